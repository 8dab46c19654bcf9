"""Asks the hub's cache for models, in a process of its own: the libraries read the cache's place and offline mode
when they are imported.

The input is a JSON list of questions. `{"load": KIND, "name": NAME, "with": {…}}` is for `KIND.from_pretrained(NAME,
…)`, and `{"snapshot": NAME, "with": {…}}` for the folder of `snapshot_download(NAME, …)`. The output is the list of
answers; an exception's answer is its text.
"""

import json
import sys

import transformers
from huggingface_hub import snapshot_download

from models import fingerprints, listening, tensors_of, ties


def load(kind, name, keywords):
    kind = getattr(transformers, kind)
    with listening() as said:
        model, info = kind.from_pretrained(name, output_loading_info=True, **keywords)
    tensors = tensors_of(model)
    text = transformers.AutoTokenizer.from_pretrained(name, **keywords)("w1 w2").input_ids
    return {
        "tensors": fingerprints(tensors),
        "ties": ties(tensors),
        "info": {what: sorted(map(str, names)) for what, names in info.items()},
        "tokens": text,
        "said": said,
    }


def answer(question):
    keywords = question.get("with", {})
    try:
        if "snapshot" in question:
            return {"folder": snapshot_download(question["snapshot"], **keywords)}
        return load(question["load"], question["name"], keywords)
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"


if __name__ == "__main__":
    print(json.dumps([answer(question) for question in json.load(sys.stdin)]))
