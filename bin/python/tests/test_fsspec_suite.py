"""fsspec's own suite for file systems, which passes whole: nothing is left out. Beside a node all of it runs, alone and through the
node; else a short form: alone, and of the patterns every fourth."""

import fsspec
import pytest
from fsspec.tests import abstract
from fsspec.tests.abstract import common

from conftest import REGISTRY

KINDS = ["alone", "group"] if REGISTRY else ["alone"]
if REGISTRY is None:
    patterns = common.GLOB_EDGE_CASES_TESTS["argvalues"]
    patterns[:] = patterns[::4]


class SuiteFixtures(abstract.AbstractFixtures):
    @pytest.fixture(scope="module", params=KINDS)
    @classmethod
    def fs(cls, request, source):
        settings = {"registry": REGISTRY} if request.param == "group" else {"memory": "64M"}
        files = fsspec.filesystem("spurline", source=str(source), writable=True, skip_instance_cache=True, **settings)
        files.suite_folder = f"suite-{request.param}"
        files.makedirs(files.suite_folder, exist_ok=True)
        yield files
        files.client.close()

    @pytest.fixture
    def fs_path(self, fs):
        return fs.suite_folder


class TestGet(abstract.AbstractGetTests, SuiteFixtures):
    pass


class TestPut(abstract.AbstractPutTests, SuiteFixtures):
    pass


class TestCopy(abstract.AbstractCopyTests, SuiteFixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, SuiteFixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, SuiteFixtures):
    pass
