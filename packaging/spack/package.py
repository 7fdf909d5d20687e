# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpiddp(PythonPackage):
    """PyTorch's DistributedDataParallel, native to MPI.

    DistributedDataParallel and torch.distributed on the MPI of the site, from any build of PyTorch.
    """

    homepage = "https://pypi.org/project/mpiddp"
    pypi = "mpiddp/mpiddp-0.1.0.tar.gz"

    license("BSD-3-Clause", checked_by="mpiddp")

    # The checksum is filled in when the release is on PyPI.
    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    depends_on("c", type="build")

    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cython@3.1:", type="build")
    depends_on("mpi@3.1:")
    depends_on("py-mpi4py@4:", type=("build", "run"))
    depends_on("py-torch@2.11:+distributed", type=("build", "run"))
    depends_on("py-numpy", type=("build", "run"))

    conflicts("platform=darwin", msg="mpiddp runs on Linux")

    import_modules = ["mpiddp", "mpiddp.optim", "mpiddp.horovod", "mpiddp.apex"]

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        env.set("MPICC", self.spec["mpi"].mpicc)
