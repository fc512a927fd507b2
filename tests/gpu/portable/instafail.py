import sys, pytest


class P:
    def pytest_runtest_logreport(self, report):
        if report.failed:
            print("\nFAILED", report.nodeid, report.longreprtext[-1800:], flush=True)
        elif report.when == "call":
            print("ok", report.nodeid.rpartition("::")[2], f"{report.duration:.1f}", flush=True)


sys.exit(pytest.main(sys.argv[1:], plugins=[P()]))
