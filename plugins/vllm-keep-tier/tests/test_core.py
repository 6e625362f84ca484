"""Who may keep its tier, and that nothing is cleared while a transfer runs. No engine runs."""

import unittest
from types import SimpleNamespace
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vllm_keep_tier import core
from vllm_keep_tier.refusal import is_refusal, refusal


def bundle(*parts: object) -> MultiConnector:
    multi = object.__new__(MultiConnector)
    multi._connectors = list(parts)
    return multi


def offloading(kind: type = OffloadingConnector) -> OffloadingConnector:
    return object.__new__(kind)


class Survival(unittest.TestCase):
    def test_offloading_and_bundles_of_it(self) -> None:
        for connector in (
            None,
            offloading(),
            bundle(offloading()),
            bundle(offloading(), bundle(offloading(), offloading())),
        ):
            self.assertTrue(core.survives(connector), connector)

    def test_any_other_part_spoils_a_bundle(self) -> None:
        for connector in (
            object(),
            bundle(offloading(), object()),
            bundle(object(), offloading()),
            bundle(offloading(), bundle(object())),
        ):
            self.assertFalse(core.survives(connector), connector)

    def test_another_class_of_that_name(self) -> None:
        namesake = type("OffloadingConnector", (), {})
        derived = type("OffloadingConnector", (OffloadingConnector,), {})
        self.assertFalse(core.survives(namesake()))
        self.assertFalse(core.survives(offloading(derived)))

    def test_refusal_names_the_connector_and_the_way_out(self) -> None:
        engine = SimpleNamespace(scheduler=SimpleNamespace(connector=bundle(object())))
        with self.assertRaises(ValueError) as raised:
            core.refuse_unless_safe(engine)
        self.assertEqual(str(raised.exception), refusal("MultiConnector"))
        self.assertIn("Drop clear_connector_cache=False", str(raised.exception))

    def test_refusal_is_known_again_as_the_frontend_gets_it(self) -> None:
        said = Exception(f"Call to sleep method failed: {refusal('MooncakeStoreConnector')}")
        self.assertTrue(is_refusal(said))
        self.assertFalse(is_refusal(Exception("Call to sleep method failed: out of memory")))


class FinishPause(unittest.TestCase):
    def setUp(self) -> None:
        self.stock = mock.Mock(return_value=None)
        self.finish_pause = core._finish_pause(self.stock)
        self.engine = mock.Mock()
        self.engine.scheduler.connector.has_pending_push_work.return_value = False

    def test_clears_all_but_the_tier(self) -> None:
        self.finish_pause(self.engine, core._CLEAR_ALL_BUT_THE_TIER)
        self.stock.assert_called_once_with(self.engine, False)
        self.engine._reset_caches.assert_called_once_with(reset_connector=False)

    def test_other_pauses_are_stock(self) -> None:
        for clear_cache in (True, False):
            self.finish_pause(self.engine, clear_cache)
            self.stock.assert_called_with(self.engine, clear_cache)
        self.engine._reset_caches.assert_not_called()

    def test_nothing_is_cleared_under_a_transfer(self) -> None:
        self.engine.scheduler.connector.has_pending_push_work.return_value = True
        with self.assertRaisesRegex(RuntimeError, "in flight"):
            self.finish_pause(self.engine, core._CLEAR_ALL_BUT_THE_TIER)
        self.engine._reset_caches.assert_not_called()
