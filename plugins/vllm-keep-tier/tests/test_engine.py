"""What the plugin does to a real engine, told by the engine's own counters."""

import json
import unittest

from engine import (
    BLOCK_TOKENS,
    EXTERNAL_HITS,
    LOADED_BYTES,
    STORED_BYTES,
    Engine,
    prompt,
    wait_until,
)

KEEP = "clear_connector_cache=false"
BLOCKS = 8
HIT_TOKENS = BLOCKS * BLOCK_TOKENS


class OnEngine(unittest.TestCase):
    """One engine a class; each test has a prompt of its own, so that nothing of another is hit."""

    options: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    engine: Engine
    _prompts = 0

    @classmethod
    def setUpClass(cls) -> None:
        cls.engine = Engine(*cls.options, vllm=cls.vllm)
        cls.addClassCleanup(cls.engine.stop)

    def setUp(self) -> None:
        OnEngine._prompts += 1
        self.tokens = prompt(OnEngine._prompts, BLOCKS)

    def warm(self) -> tuple[str, float]:
        """Asks for the prompt; returns the text, and the bytes of the tier that it took."""
        text, rise = self.replay()
        self.assertGreater(rise[STORED_BYTES], 0)
        self.assertEqual(rise[EXTERNAL_HITS], 0)
        return text, rise[STORED_BYTES]

    def replay(self) -> tuple[str, dict[str, float]]:
        """Asks for the prompt; returns the text, and what the counters rose by."""
        before = self.engine.counters()
        text = self.engine.complete(self.tokens)
        # A store is counted a step or two after the answer. This prompt fills no block, stores
        # nothing itself, and takes eight steps.
        self.engine.complete(prompt(0, blocks=0))
        after = self.engine.counters()
        return text, {name: after[name] - before[name] for name in before}

    def post(self, path: str) -> None:
        status, answer = self.engine.call("POST", path)
        self.assertEqual(status, 200, answer)

    def assert_kept(self, text: str, stored: float) -> None:
        again, rise = self.replay()
        self.assertEqual(rise[EXTERNAL_HITS], HIT_TOKENS)
        self.assertEqual(rise[LOADED_BYTES], stored)
        self.assertEqual(rise[STORED_BYTES], 0)
        self.assertEqual(again, text)

    def assert_cleared(self, text: str, stored: float) -> None:
        again, rise = self.replay()
        self.assertEqual(rise[EXTERNAL_HITS], 0)
        self.assertEqual(rise[LOADED_BYTES], 0)
        self.assertEqual(rise[STORED_BYTES], stored)
        self.assertEqual(again, text)


class NotAskedFor(OnEngine):
    """Installed, and off."""

    options = ("--offload",)

    def test_argument_is_not_declared(self) -> None:
        self.assertEqual(self.engine.arguments("/sleep"), ["level", "mode"])
        self.assertEqual(self.engine.arguments("/pause"), ["mode", "clear_cache"])

    def test_argument_is_ignored_and_tier_evicted(self) -> None:
        text, stored = self.warm()
        self.post(f"/sleep?level=1&{KEEP}")
        self.post("/wake_up")
        self.assert_cleared(text, stored)


class KeptTier(OnEngine):
    options = ("--offload", "--keep-tier")

    def test_argument_is_declared(self) -> None:
        self.assertEqual(
            self.engine.arguments("/sleep"), ["level", "mode", "clear_connector_cache"]
        )
        self.assertEqual(
            self.engine.arguments("/pause"), ["mode", "clear_cache", "clear_connector_cache"]
        )

    def test_sleep_keeps(self) -> None:
        for level in (1, 2):
            for mode in ("abort", "wait", "keep"):
                with self.subTest(level=level, mode=mode):
                    self.setUp()
                    text, stored = self.warm()
                    self.post(f"/sleep?level={level}&mode={mode}&{KEEP}")
                    self.post("/wake_up")
                    self.assert_kept(text, stored)

    def test_sleep_clears_by_default(self) -> None:
        for path in ("/sleep?level=1", "/sleep?level=1&clear_connector_cache=true"):
            with self.subTest(path=path):
                self.setUp()
                text, stored = self.warm()
                self.post(path)
                self.post("/wake_up")
                self.assert_cleared(text, stored)

    def test_pause_keeps(self) -> None:
        text, stored = self.warm()
        self.post(f"/pause?{KEEP}")
        self.post("/resume")
        self.assert_kept(text, stored)

    def test_pause_clears_by_default(self) -> None:
        text, stored = self.warm()
        self.post("/pause")
        self.post("/resume")
        self.assert_cleared(text, stored)

    def test_keeping_is_for_one_pause(self) -> None:
        text, stored = self.warm()
        self.post(f"/pause?{KEEP}")
        self.post("/sleep?level=1")
        self.post("/wake_up")
        self.assert_cleared(text, stored)

    def test_kept_tier_is_evicted_by_a_reset(self) -> None:
        text, stored = self.warm()
        self.post(f"/sleep?level=1&{KEEP}")
        self.post("/wake_up")
        self.post("/reset_prefix_cache?reset_external=true")
        self.assert_cleared(text, stored)

    def test_sleep_level_is_recorded(self) -> None:
        self.post(f"/sleep?level=1&{KEEP}")
        metrics = self.engine.raw("GET", "/metrics")[1]
        self.post("/wake_up")
        [offloaded] = [
            line for line in metrics.splitlines() if 'sleep_state="weights_offloaded"' in line
        ]
        self.assertEqual(float(offloaded.rpartition(" ")[2]), 1)

    def test_bad_value_is_refused(self) -> None:
        status, _ = self.engine.call("POST", "/sleep?level=1&clear_connector_cache=perhaps")
        self.assertEqual(status, 400)
        self.assertEqual(self.engine.states(), (False, False))

    def test_running_request_resumes_from_a_sleep(self) -> None:
        self.check_running_request(f"/sleep?level=1&mode=keep&{KEEP}", "/wake_up")

    def test_running_request_resumes_from_a_pause(self) -> None:
        self.check_running_request(f"/pause?mode=keep&{KEEP}", "/resume")

    def check_running_request(self, pause: str, resume: str) -> None:
        before = self.engine.counters()
        stream = self.engine.stream(self.tokens, max_tokens=800)
        wait_until(
            lambda: self.engine.counters()[STORED_BYTES] > before[STORED_BYTES],
            "the prompt is stored",
        )
        stored = self.engine.counters()[STORED_BYTES] - before[STORED_BYTES]
        self.post(pause)
        self.assertIsNone(stream.finish_reason(), "it ended before the pause")
        self.post(resume)
        stream.end()
        self.assertIsNone(stream.error())
        self.assertEqual(stream.finish_reason(), "length")
        self.assertEqual(stream.completion_tokens(), 800)
        # Hits are counted for new requests only; what was loaded, for all.
        loaded = self.engine.counters()[LOADED_BYTES] - before[LOADED_BYTES]
        self.assertGreaterEqual(loaded, stored)
        self.assertEqual(self.engine.raw("GET", "/health")[0], 200)


class BundleOfKept(KeptTier):
    """The same with that connector as the one part of a MultiConnector."""

    options = ("--offload", "--keep-tier")
    vllm = (
        "--kv-transfer-config",
        json.dumps(
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "connectors": [
                        {
                            "kv_connector": "OffloadingConnector",
                            "kv_role": "kv_both",
                            "kv_connector_extra_config": {
                                "spec_name": "HostOffloadingSpec",
                                "spec_module_path": "fak_rig.host_offload",
                                "cpu_bytes_to_use": 256 << 20,
                            },
                        }
                    ]
                },
            }
        ),
    )


class BundleOfOthers(OnEngine):
    """A MultiConnector with a part that nobody has shown to keep its cache."""

    options = ("--offload", "--bundle", "--keep-tier")

    def test_refused_before_anything_is_paused(self) -> None:
        stream = self.engine.stream(self.tokens, max_tokens=800)
        wait_until(lambda: stream.chunks, "a token")
        for path in (f"/sleep?level=1&{KEEP}", f"/pause?mode=abort&{KEEP}"):
            status, answer = self.engine.call("POST", path)
            self.assertEqual(status, 400)
            self.assertIn("MultiConnector cannot keep its cache", answer["error"])
            self.assertEqual(self.engine.states(), (False, False))
        stream.end()
        self.assertEqual(stream.finish_reason(), "length")

    def test_served_by_default(self) -> None:
        self.post("/sleep?level=1")
        self.assertEqual(self.engine.states(), (True, True))
        self.post("/wake_up")
        self.assertEqual(self.engine.states(), (False, False))
