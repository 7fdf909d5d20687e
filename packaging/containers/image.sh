#!/usr/bin/env bash
# Make an image like that of the Dockerfile where no registry of images can be reached, for tests.
#
#   packaging/containers/image.sh BIN               # what is the same in all images, once
#   packaging/containers/image.sh BIN IMAGE         # an image, from what the first form has made
#   packaging/containers/image.sh --install         # the programs of Debian that this needs
#
# IMAGE is a folder that Charliecloud's ch-run runs: Debian 12 with its Python 3.11, and torch,
# mpi4py, mpiddp's wheel from dist/ and what examples/train.py imports. BIN is of an environment,
# whose pip is used. All but mpiddp lies in ~/.cache/mpiddp, for all clones, and an image shares its
# files. Needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ $1 == --install ]]; then
    export DEBIAN_FRONTEND=noninteractive
    packages=(charliecloud-runtime debootstrap)
    apt-get install -y -qq --no-install-recommends "${packages[@]}" ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}"; }
    exit
fi
bin=$1 image=${2:-}
fail() {
    echo "image.sh: $*" >&2
    exit 1
}

[[ $(id -u) == 0 ]] || fail "making an image needs root"
for program in ch-run debootstrap; do
    command -v $program >/dev/null ||
        fail "no $program: apt-get install charliecloud-runtime debootstrap"
done
python=3.11 # of Debian 12

names="torch mpi4py numpy scikit-learn tqdm"
versions=$(grep -E "^(${names// /|})==" constraints.txt)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mpiddp
base=$cache/container-$(sha256sum <<<"$python $versions" | cut -c -12)
site=usr/local/lib/python$python/dist-packages
pip=("$bin/python" -m pip --disable-pip-version-check --quiet)

if [[ ! -e $base ]]; then
    [[ -z $image ]] || fail "no $base: make test-container makes it"
    echo "Making $base: Debian, Python and PyTorch (minutes, once)"
    mkdir -p "$cache"
    # Those of other versions; images that were made from them keep their files.
    rm -rf "$cache"/container-*
    debootstrap --variant=minbase --include=python3 bookworm "$base.part" >"$base.log" ||
        fail "debootstrap failed, see $base.log"
    # As PyTorch's own index has it, without CUDA, where that can be reached.
    index=https://download.pytorch.org/whl/cpu
    "$bin/python" -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=10)" \
        2>/dev/null || index=""
    # shellcheck disable=SC2086
    "${pip[@]}" install -c constraints.txt --target "$base.part/$site" --no-compile \
        --only-binary=:all: --python-version $python ${index:+--extra-index-url $index} $names
    # Programs there would start this machine's Python.
    rm -rf "$base.part/$site/bin"
    rm -rf "$base.part"/var/cache/apt/archives/*.deb "$base.part"/var/lib/apt/lists/*
    mv "$base.part" "$base"
fi
[[ -n $image ]] || exit 0

wheel=$(ls -t dist/mpiddp-*-cp311-*_"$(uname -m)".whl 2>/dev/null | head -n 1 || true)
[[ -n $wheel ]] || fail "no wheel for Python $python in dist/: make wheel PYTHON=python$python"
rm -rf "$image" "$image.part"
mkdir -p "$(dirname "$image")"
# Nobody writes into an image, so it may have the files of the other one.
cp -al "$base" "$image.part" 2>/dev/null || { rm -rf "$image.part" && cp -a "$base" "$image.part"; }
"${pip[@]}" install --no-deps --no-index --no-compile --target "$image.part/$site" \
    --only-binary=:all: --python-version $python "$wheel"
rm -rf "$image.part/$site/bin"
# Where something is bound to there must be a folder.
mkdir -p "$image.part/host/mpi" "$image.part/ch"
sed -n 's/^ENV //p' packaging/containers/Dockerfile >"$image.part/ch/environment"
mv "$image.part" "$image"
