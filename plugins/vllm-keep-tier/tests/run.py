"""Runs the tests and says last how many passed."""

import sys
import unittest

MODULES = ("test_compatibility", "test_core", "test_engine")


def main() -> int:
    names = sys.argv[1:] or MODULES
    tests = unittest.defaultTestLoader.loadTestsFromNames(names)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(tests)
    # A test fails once, however many of its subtests do. What is no test is the setting up of
    # a class, whose tests have then not run.
    failed = {getattr(test, "test_case", test) for test, _ in result.failures + result.errors}
    passed = result.testsRun - sum(isinstance(each, unittest.TestCase) for each in failed)
    print(f"{passed} passed, {len(failed)} failed")
    return 0 if result.wasSuccessful() and result.testsRun else 1


if __name__ == "__main__":
    sys.exit(main())
