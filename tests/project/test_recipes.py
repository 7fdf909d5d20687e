"""The recipes in packaging/ want what pyproject.toml does; its version is the only one."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
CONDA = PACKAGING / "conda" / "recipe.yaml"
SPACK = PACKAGING / "spack" / "package.py"
(EASYBUILD,) = (PACKAGING / "easybuild").glob("*.eb")

pytestmark = pytest.mark.once


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


PROJECT = text_of(ROOT / "pyproject.toml")


def version() -> str:
    found = re.search(r'^version = "(.+)"$', PROJECT, re.MULTILINE)
    assert found is not None
    return found[1]


def least(name: str) -> str:
    """Return the oldest release that pyproject.toml takes of a package, or of Python."""
    pattern = r'requires-python = ">=([\d.]+)"' if name == "python" else rf'"{name}>=([\d.]+)"'
    found = re.search(pattern, PROJECT)
    assert found is not None, name
    return found[1]


def test_version() -> None:
    assert f'version: "{version()}"' in text_of(CONDA)
    assert f'version("{version()}", sha256=' in text_of(SPACK)
    assert f"version = '{version()}'" in text_of(EASYBUILD)
    assert EASYBUILD.name.startswith(f"mpiddp-{version()}-")


@pytest.mark.parametrize(
    ("name", "in_conda", "in_spack"),
    [
        ("torch", "pytorch", "py-torch"),
        ("mpi4py", "mpi4py", "py-mpi4py"),
        ("Cython", "cython", "py-cython"),
        ("setuptools", "setuptools", "py-setuptools"),
    ],
)
def test_oldest_releases(name: str, in_conda: str, in_spack: str) -> None:
    assert f"- {in_conda} >={least(name)}\n" in text_of(CONDA)
    assert re.search(rf'"{in_spack}@{least(name).removesuffix(".0")}:', text_of(SPACK))


def test_oldest_python() -> None:
    assert f'"python@{least("python")}:"' in text_of(SPACK)


def test_oldest_releases_for_easybuild() -> None:
    """There every version is named."""
    for name, package in (("torch", "PyTorch"), ("mpi4py", "mpi4py"), ("Cython", "Cython")):
        found = re.search(rf"\('{package}', '([\d.]+)'\)", text_of(EASYBUILD))
        assert found is not None
        named, oldest = (tuple(map(int, one.split("."))) for one in (found[1], least(name)))
        assert named >= oldest


ONLY_TEST_ALL = "only `make test-all` installs it"


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_conda_renders(mpi: str) -> None:
    """As rattler-build does it before it builds, with what conda-forge sets."""
    rattler = pytest.importorskip("rattler_build", reason=ONLY_TEST_ALL)
    compilers = {"c_compiler": ["gcc"], "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]}
    variants = rattler.VariantConfig({"mpi": [mpi], "python": ["3.12.* *_cpython"], **compilers})
    (rendered,) = rattler.Stage0Recipe.from_file(str(CONDA)).render(variants)
    recipe = rendered.recipe.to_dict()
    assert recipe["package"] == {"name": "mpiddp", "version": version()}
    assert recipe["build"]["string"].startswith(f"mpi_{mpi}_py312_h")
    needs = recipe["requirements"]
    assert needs["build"] == ["gcc_linux-64", "sysroot_linux-64 2.28.*"]
    assert mpi in needs["host"]
    assert mpi in needs["run"]


def test_easybuild_has_what_it_names() -> None:
    """Its own parser and check of style, and its easyconfigs of the same toolchain."""
    pytest.importorskip("easybuild.framework", reason=ONLY_TEST_ALL)
    from easybuild.framework.easyconfig.parser import EasyConfigParser
    from easybuild.framework.easyconfig.style import check_easyconfigs_style

    assert check_easyconfigs_style([str(EASYBUILD)]) == 0
    recipe = EasyConfigParser(str(EASYBUILD)).get_config_dict()
    named = recipe["builddependencies"] + recipe["dependencies"]
    toolchain = recipe["toolchain"]
    released = Path(sys.prefix) / "easybuild" / "easyconfigs"
    for name, release in [*named, (toolchain["name"], toolchain["version"])]:
        found = list(released.glob(f"?/{name}/{name}-{release}*.eb"))
        # EasyBuild 5.4.1 has none that is as new as mpiddp needs.
        assert found or (name, release) == ("PyTorch", "2.11.0"), (name, release)


@pytest.mark.parametrize("name", ["Dockerfile", "mpiddp.def"])
def test_containers(name: str) -> None:
    text = text_of(PACKAGING / "containers" / name)
    assert f'"torch>={least("torch")}"' in text
    assert "openmpi" not in text
    assert "mpich" not in text
