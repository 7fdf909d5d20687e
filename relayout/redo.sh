#!/bin/bash
# Run the script on a fresh checkout of branch $1 (rooms) and bring the result into /work/w-rooms
# without touching files that did not change (so that builds stay incremental).
cd /tmp/rooms/tree && git reset -q --hard && git clean -fdxq && git checkout -q --detach ${1:-rooms} && git reset -q --hard && git clean -fdxq && python3 /tmp/rooms/restructure.py || exit 1
python3 /tmp/rooms/sync.py
