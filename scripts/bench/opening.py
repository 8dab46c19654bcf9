"""Opening a model of very many tensors, cold and with it in the page cache."""

from bench.fixtures import uniform, write_model
from bench.machine import machine
from bench.models import in_process, many_tensors
from bench.results import Results
from bench.workloads import open_with_ckptfs, open_with_safetensors, make_request

OPENED = {"ckptfs": open_with_ckptfs, "safetensors": open_with_safetensors}


def main():
    results = Results("opening")
    with machine() as measuring:
        many, tiny = measuring.folder / "many", measuring.folder / "few"
        in_process(many_tensors, folder=many)
        write_model(tiny, uniform(2, 2, 32))
        for state, prepare in measuring.states(many):
            runs = measuring.compare({
                name: lambda one=one: measuring.run(make_request(one), many, tiny, prepare=prepare)
                for name, one in OPENED.items()
            })  # fmt: skip
            results.add_all("opening", state, runs)
