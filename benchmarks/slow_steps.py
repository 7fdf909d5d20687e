"""Train with planted faults, on hosts made of namespaces; keep what the report says. Needs root.

    python benchmarks/slow_steps.py [--output FOLDER] [CASE ...]
    python benchmarks/slow_steps.py --train CASE TRACE      # what each rank runs

For docs/how-to/my-step-is-slow.md: the text of each report, and pictures of its charts, which
Chromium takes of the page. Four hosts have a rank each. Backward sleeps, as a thread does whose
device computes, so the ranks leave the cores of this machine to communication.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from between_hosts import Hosts, hosts_up
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import SleepingLinear

import mpiddp

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "slow-steps"
RANKS, LAYERS, WIDTH, STEPS = 4, 8, 512, 30
# Seconds that the backward of a layer takes, and from which step on there is a fault.
COMPUTES, SINCE = 10e-3, 10
USUAL_RATE = "2gbit"


@dataclass(frozen=True)
class Case:
    """A fault, and what of its report is shown.

    Attributes:
        charts: their names, as in mpiddp/report/charts.py.
        bucket_cap_mb: of the wrapped module; None: the default.
        slow_host: on it backward takes longer.
        slow_rank: it does something between forward and backward.
        slow_link: the host whose link is slower, and its rate.
        sends_16_bits: whether gradients travel in bfloat16.
    """

    charts: tuple[str, ...]
    bucket_cap_mb: float | None = None
    slow_host: str = ""
    slow_rank: int = -1
    slow_link: tuple[str, str] = ("", "")
    sends_16_bits: bool = False


CASES = {
    "healthy": Case(("typical",)),
    "one-bucket": Case(("typical",), bucket_cap_mb=1000),
    "slow-host": Case(("late",), slow_host="node3"),
    "slow-rank": Case(("typical",), slow_rank=0),
    "slow-link": Case(("typical",), slow_link=("node2", "400mbit")),
    "slow-link-16-bits": Case(("typical",), slow_link=("node2", "400mbit"), sends_16_bits=True),
}


def train(case: Case, trace: str) -> None:
    """Train and trace. Collective."""
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    module = nn.Sequential(*(SleepingLinear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = mpiddp.DistributedDataParallel(module, bucket_cap_mb=case.bucket_cap_mb)
    if case.sends_16_bits:
        model.register_comm_hook(None, mpiddp.compression.bf16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = DataLoader(TensorDataset(torch.randn(STEPS * 8, WIDTH)), batch_size=8)
    is_slow = case.slow_host == socket.gethostname()
    with mpiddp.trace(trace, steps=STEPS):
        for step, (batch,) in enumerate(batches):
            for layer in module:
                layer.seconds = COMPUTES * (1.6 if is_slow and step >= SINCE else 1)
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            if dist.get_rank() == case.slow_rank and step >= SINCE:
                time.sleep(60e-3)
            loss.backward()
            optimizer.step()
    mpiddp.destroy_process_group()


def trained(hosts: Hosts, name: str, folder: Path) -> Path:
    """Train with a fault on the hosts, and return the folder of the trace."""
    case, place = CASES[name], folder / name
    hosts.cluster("rate", USUAL_RATE)
    node, rate = case.slow_link
    if node:
        hosts.cluster("rate", rate, node)
    hosts.launch(RANKS, 1, [str(Path(__file__)), "--train", name, str(place)], limit=120)
    return place


def reported(trace: Path) -> str:
    """Make the page of a trace, and return the text."""
    command = [sys.executable, "-m", "mpiddp.report", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, _, _ = done.stdout.partition("\nCharts: ")
    return text.strip() + "\n"


def picture(page: Path, chart: str, path: Path) -> None:
    """Take a picture of one chart of a page, with its heading and its legend."""
    alone = page.with_name(f"{chart}.html")
    style = (
        f"<style>section:not([aria-labelledby='h-{chart}']), h1, main > p {{ display: none }} "
        "main h2 { margin-top: 8px } body { padding-bottom: 24px } "
        ".modebar { display: none }</style>"
    )
    text = page.read_text(encoding="utf-8").replace("</head>", f"{style}</head>", 1)
    measure = "<script>document.body.dataset.high = document.body.scrollHeight;</script>"
    alone.write_text(text.replace("</body>", f"{measure}</body>"), encoding="utf-8")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise RuntimeError("there is no Chromium to take pictures with")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={page.parent / 'browser'}", "--hide-scrollbars"]
    command += ["--virtual-time-budget=10000"]
    size = "--window-size=960,{}"
    done = subprocess.run(
        [*command, size.format(900), "--dump-dom", alone.as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    high = done.stdout.partition('data-high="')[2].partition('"')[0]
    subprocess.run(
        [*command, size.format(high), f"--screenshot={path}", alone.as_uri()],
        capture_output=True, check=True,
    )  # fmt: skip


def main() -> None:
    """Run the cases on the hosts, or be one of their ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", nargs=2, metavar=("CASE", "TRACE"), help="be a rank")
    parser.add_argument("--output", type=Path, default=RESULTS, help="(%(default)s)")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    args = parser.parse_args()
    if args.train:
        train(CASES[args.train[0]], args.train[1])
        return
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mpiddp-slow-", dir="/tmp") as name:
        with hosts_up(RANKS) as hosts:
            traces = {each: trained(hosts, each, Path(name)) for each in args.cases or CASES}
        for each, trace in traces.items():
            text = reported(trace)
            (args.output / f"{each}.txt").write_text(text, encoding="utf-8")
            print(f"== {each}\n\n{text}", flush=True)
            for chart in CASES[each].charts:
                path = args.output / f"{each}-{chart}.png"
                picture(trace / "report.html", chart, path)


if __name__ == "__main__":
    main()
