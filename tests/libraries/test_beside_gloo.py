"""Scripts for other people's libraries end with the same losses on MPI as under torchrun with Gloo.

They lie in tests/support/scripts/libraries/, and none of them knows of MPI. Each test runs one by
torchrun and once more by `mpirun python -m mpiddp`. `make test-all` installs the libraries.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mpirun
import pytest
from script_runs import objects_in

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts" / "libraries"

# A slow test also compiles: torch.compile, or DeepSpeed when a machine first runs it.
SECONDS = 250

# DeepSpeed compiles with the ninja of this environment. Nothing is looked for in a network.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}

TORCHS, OURS = "torch.nn.parallel.distributed", "mpiddp"


def compare(script: str, folder: Path, *cases: str, ranks: int = 2, timeout: float = 85) -> None:
    """Run a script both ways and compare what its ranks say of each case.

    Where torch's DistributedDataParallel was used with Gloo, ours must have been on MPI.
    """
    # What DeepSpeed compiles serves all tests of this run: another environment's would be replaced.
    env = ENVIRONMENT | {"TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions")}
    said = {}
    for backend in ("mpiddp", "gloo"):
        (folder / backend).mkdir()
        command: list[str | os.PathLike[str]] = [SCRIPTS / script, folder / backend, *cases]
        if backend == "mpiddp":
            done = mpirun.run(ranks, ["-m", "mpiddp", *command], timeout, env)
            said[backend] = read(done)
            assert done.returncode == 0
            continue
        # As start_on_gloo in support/script_runs.py says, the exit status says nothing here.
        # DeepSpeed's own launcher sets it, and ours does.
        env = env | {"LOCAL_SIZE": str(ranks)}
        for _ in range(3):
            done = mpirun.run_torchrun(ranks, command, timeout, env)
            said[backend] = read(done)
            if done.returncode == 0 or len(said[backend]) == len(said["mpiddp"]):
                break
            assert "without an active exception" in done.stderr
    assert sorted(said["mpiddp"]) == sorted(said["gloo"])
    assert {rank for _, rank in said["gloo"]} == set(range(ranks))
    assert {case for case, _ in said["gloo"]} >= set(cases)
    for place, mine in said["mpiddp"].items():
        torchs = said["gloo"][place]
        # "undefined" if the script names none
        assert mine.pop("backend") == torchs.pop("backend")
        assert mine.pop("world") == torchs.pop("world") == ranks
        wrapper = torchs.pop("wrapper", None)
        assert mine.pop("wrapper", None) == (OURS if wrapper == TORCHS else wrapper)
        assert len(torchs["losses"]) > 2
        assert mine == same(torchs), place


def read(done: "subprocess.CompletedProcess[str]") -> dict[tuple[str, int], dict[str, Any]]:
    """Return what a run printed, by case and rank."""
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    found = [one for one in objects_in(done.stdout) if "case" in one]
    return {(one.pop("case"), one.pop("rank")): one for one in found}


def same(value: Any) -> Any:
    """Return what equals `value` if numbers are about the same."""
    match value:
        case float():
            return pytest.approx(value, rel=1e-5, nan_ok=True)
        case Mapping():
            return {key: same(inner) for key, inner in value.items()}
        case str():
            return value
        case Iterable():
            return [same(inner) for inner in value]
    return value


def needs(library: str) -> None:
    """Skip the test without the library. It is not imported: that takes seconds."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is missing: `make test-all` installs it")


@pytest.mark.timeout(180)
@pytest.mark.once
@pytest.mark.slow
def test_fabric(tmp_path: Path) -> None:
    """Accumulation, clipping, bfloat16, collectives and checkpoints of Lightning Fabric."""
    compare("fabric_loop.py", tmp_path)


@pytest.mark.timeout(180)
@pytest.mark.once
@pytest.mark.slow
def test_image_classifier(tmp_path: Path) -> None:
    """Like the ImageNet example of pytorch/examples."""
    compare("image_classifier.py", tmp_path)


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_character_gpt(tmp_path: Path) -> None:
    """Like the minGPT-ddp example of pytorch/examples."""
    compare("character_gpt.py", tmp_path, "plain", "autocast")


@pytest.mark.timeout(180)
@pytest.mark.slow
@pytest.mark.parametrize("library", ["ignite", "monai"])
def test_libraries_that_ask_for_the_backend(tmp_path: Path, library: str) -> None:
    """They wrap and gather for the names that they know."""
    needs(library)
    compare("asking_libraries.py", tmp_path, library)


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        # FSDP comes last: the Trainer asks for it by variables of the environment. Without a GPU
        # Accelerate takes DDP instead.
        "bert gpt2 accumulation unused bf16 checkpointing resume fsdp",
        "compile",
    ],
)
def test_transformers(tmp_path: Path, cases: str) -> None:
    """Hugging Face's Trainer."""
    needs("transformers")
    compare("transformers_trainer.py", tmp_path, *cases.split(), timeout=SECONDS)


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("cases", ["zero0 zero1 zero2 zero3 bf16", "pipeline", "experts"])
def test_deepspeed(tmp_path: Path, cases: str) -> None:
    """ZeRO, pipelines and mixtures of experts, with checkpoints."""
    needs("deepspeed")
    compare("deepspeed_engine.py", tmp_path, *cases.split(), timeout=SECONDS)


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, "tensor sequence shards"), (4, "tensor_and_ddp tensor_and_shards")],
    ids=["alone", "grid"],
)
def test_tensor_parallel(tmp_path: Path, ranks: int, cases: str) -> None:
    """Of torch, started by a mesh; FSDP2 with a checkpoint of parts; both; DDP over pairs."""
    compare("tensor_parallel.py", tmp_path, *cases.split(), ranks=ranks, timeout=180)


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "case"), [("transformers", "tp_plan"), ("deepspeed", "init_inference")]
)
def test_inference_with_a_divided_model(tmp_path: Path, library: str, case: str) -> None:
    """A Llama of Transformers, divided by `tp_plan="auto"` and by DeepSpeed."""
    needs("transformers")
    needs(library)
    compare("divided_llama.py", tmp_path, case, timeout=180)
