"""What all pages load is loaded after the first one, once a process."""

import sys
from pathlib import Path

from app import warm_up
from engine.formats import packaged
from engine.simulate import fair_share

APP = Path(warm_up.__file__).parent


def test_every_module_of_the_studio_is_imported_and_the_simulation_compiled() -> None:
    for begin in (warm_up.begin, warm_up.begin_simulation):
        loading = begin()
        loading.join(60)
        assert not loading.is_alive() and begin() is loading, "once a process"
    files = [path.relative_to(APP.parent).with_suffix("") for path in APP.rglob("*.py") if path.stem != "main"]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in files}
    assert len(modules) > 100 and modules <= set(sys.modules)
    assert fair_share.run.signatures and packaged._read.cache_info().currsize
