"""An experiment, not part of the tests: the plugin without its flush fix.

It shows what the fix is for. `mode=keep` with the tier kept, under a running request: the engine
dies at the first step after the wake, of the assertion that a preempted request only stores.
The engine is started by this file in place of the rig, with the fix taken out of its processes
by a `sitecustomize` of their own.
"""

import importlib.machinery
import importlib.util
import os
import stat
import sys
import tempfile
import unittest
from pathlib import Path

from engine import STORED_BYTES, Engine, prompt, wait_until

# Found by each process of the engine when it starts; the plugin's own import then finds this.
WITHOUT_FIX = """\
import sys, types
flush = types.ModuleType("vllm_keep_tier.flush")
flush.install = lambda: None
sys.modules["vllm_keep_tier.flush"] = flush
"""


def launcher(folder: Path) -> str:
    """The rig's own command, run with a path on which `vllm_keep_tier.flush` does nothing."""
    (folder / "sitecustomize.py").write_text(WITHOUT_FIX)
    command = folder / "engine"
    command.write_text(f'#!/bin/sh\nexec python3 {__file__} {folder} "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return str(command)


class WithoutFlushFix(unittest.TestCase):
    def test_engine_dies_at_the_first_step_after_the_wake(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine("--offload", "--keep-tier", launcher=launcher(Path(folder)))
            self.addCleanup(engine.stop)
            before = engine.counters()[STORED_BYTES]
            stream = engine.stream(prompt(1, blocks=8), max_tokens=800)
            wait_until(lambda: engine.counters()[STORED_BYTES] > before, "the prompt is stored")
            status, answer = engine.call(
                "POST", "/sleep?level=1&mode=keep&clear_connector_cache=false"
            )
            self.assertEqual(status, 200, answer)
            engine.call("POST", "/wake_up")
            stream.end()
            self.assertIsNotNone(stream.error())
            log = Path(engine.log).read_text()
            self.assertRegex(log, r"assert self\._jobs\[any_jid\]\.is_store")


def main() -> None:
    """The rig, with one more folder in front of its engine's path."""
    folder, *arguments = sys.argv[1:]
    loader = importlib.machinery.SourceFileLoader("rig", os.environ["FAK_RIG"])
    rig = importlib.util.module_from_spec(importlib.util.spec_from_loader("rig", loader))
    loader.exec_module(rig)
    stock = rig.engine_environment

    def with_folder(options, packages):
        environment = stock(options, packages)
        return environment | {"PYTHONPATH": f"{folder}:{environment['PYTHONPATH']}"}

    rig.engine_environment = with_folder
    sys.argv[1:] = arguments
    rig.main()


if __name__ == "__main__":
    main()
