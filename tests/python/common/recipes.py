"""Random recipes for random checkpoints, and what torch makes of them.

Each rule is first applied here: to names by `fnmatch` and `re`, and to tensors by torch. Rules that torch cannot apply,
or that give two tensors one name, are left out.
"""

import fnmatch
import json
import random
import re

import torch
from safetensors.torch import save_file

import training
from casts import FLOAT8S, FLOATS, cast, has_cast, name_of
from compare import bits
from pickles import turned_round
from writers import DTYPES, UNCLASSED, Writer, numbers
from zero import Run

PACKED = torch.float4_e2m1fn_x2


def expand(template, match, number=None):
    """The text of a template of a recipe for a match."""
    def piece(found):
        if found[0] == "{}":
            return "{}" if number is None else str(number)
        return "$" if found[0] == "$$" else match[int(group) if (group := found[1] or found[2]).isdigit() else group] or ""

    return re.sub(r"\$\$|\{\}|\$\{(\w+)\}|\$(\w+)", piece, template)


def any_glob(rng, names):
    """A glob that matches one of the names."""
    name = rng.choice(sorted(names))
    literal = re.sub(r"[*?[]", lambda found: f"[{found[0]}]", name)
    cut = rng.randint(0, len(name))
    ways = ["*", literal, "*" + literal] + [f"*{end}" for end in [name[cut:]] if not re.search(r"[*?[]", end)]
    ways += [f"{start}*" for start in [name[:cut]] if not re.search(r"[*?[]", start)]
    ways += [re.sub(r"\d", "[0-9]", literal), re.sub(r"\d", "[!a-z]", literal), re.sub(r"\w$", "?", literal)]
    return rng.choice([glob for glob in ways if fnmatch.fnmatchcase(name, glob)])


def matched(glob, names):
    return [name for name in names if fnmatch.fnmatchcase(name, glob)]


class RecipeCase:
    """Checkpoints in a folder, a recipe's steps, and the tensors that they make."""

    def __init__(self, seed, folder):
        self.rng = random.Random(f"recipe {seed}")
        self.folder = folder
        self.steps = {}
        self.sources = []
        self.tensors = {}
        folder.mkdir()
        for stem in self.rng.choice(["a", "a", "ab"]):
            self.tensors |= self.write_source(stem)
        for step, most in (("only", 2), ("drop", 2), ("rename", 3), ("slice", 3), ("split", 2), ("stack", 2), ("cast", 3)):
            if self.rng.random() < 0.6:
                self.add_rules(step, self.rng.randint(1, most))

    def add_rules(self, step, count):
        for _ in range(count):
            rules = self.steps.get(step, [])
            rule = getattr(self, f"any_{step}")(self.before_step if rules else self.tensors)
            if not rules:
                self.before_step = self.tensors
            made = rule and getattr(self, f"do_{step}")([*rules, rule])
            if made:
                self.steps[step], self.tensors = [*rules, rule], made

    # Checkpoints.

    def write_source(self, stem):
        rng = self.rng
        # The names of a training run are always the same: there is at most one.
        kinds = ["safetensors", "shards", "zip", "zip", "legacy", "swapped", "dcp"]
        kind = rng.choice(kinds + ["zero", "universal"] * (stem == "a"))
        if kind in ("zero", "universal"):
            self.sources.append(stem)
            run = Run(rng.randint(0, 999))
            return (run.write if kind == "zero" else run.write_universal)(self.folder / stem)
        # Big-endian files are made by byte-swapping values of one size.
        dtypes = {"swapped": [torch.float32], "dcp": training.DTYPES}.get(kind, DTYPES)
        writer = Writer(rng.random(), [dtype for dtype in dtypes if kind != "legacy" or dtype not in UNCLASSED])
        tensors = {}
        for n in range(rng.randint(1, 4)):
            flat = writer.flat()
            if name_of(flat.dtype) in FLOATS + FLOAT8S:
                flat[rng.randrange(flat.numel())] = float("nan")
            view = writer.view(flat)
            tensors[rng.choice(["{}.model.w{}", "{}.größe_{}.bias", "{}.a/b [{}]*", "{}.x.{}.weight"]).format(stem, n)] = view
        for group in range(rng.randint(0, 2)):
            tensors |= self.numbered(writer, f"{stem}.layers{group}" if rng.random() < 0.5 else f"{stem}.model.g{group}")
        if kind in ("safetensors", "shards", "dcp"):
            tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        return {name: tensor.contiguous() for name, tensor in self.save(kind, stem, tensors).items()}

    def numbered(self, writer, prefix):
        """Tensors of one type and shape, with numbers in their names."""
        rng, like = self.rng, writer.view(writer.flat())
        made = {}
        for n in rng.sample(range(count := rng.randint(1, 12)), count):
            shape = list(like.shape)
            flat = numbers(rng, like.dtype, like.numel()) if like.numel() else like.flatten()
            is_transposed = like.dim() > 1 and rng.random() < 0.5
            reverse = range(like.dim())[::-1]
            made[f"{prefix}.{n}.w"] = flat.view(shape[::-1]).permute(*reverse) if is_transposed else flat.view(shape)
        return made

    def save(self, kind, stem, tensors):
        if kind == "shards":
            (self.folder / stem).mkdir()
            for n in range(2):
                shard = {name: tensors[name] for name in sorted(tensors)[n::2]}
                save_file(shard, self.folder / stem / f"model-0000{n + 1}-of-00002.safetensors")
            self.sources.append(stem)
            return tensors
        if kind == "dcp":
            training.save_random_pieces(self.rng, self.folder / stem, tensors)
            self.sources.append(stem)
            return tensors
        name = f"{stem}.safetensors" if kind == "safetensors" else f"{stem}.pt"
        if kind == "safetensors":
            save_file(tensors, self.folder / name)
        elif kind == "swapped":
            torch.save(tensors, self.folder / "little")
            turned_round(self.folder / "little", self.folder / name, 4)
            (self.folder / "little").unlink()
        else:
            torch.save(tensors, self.folder / name, _use_new_zipfile_serialization=kind == "zip")
        # A pickle has two names: its own, and that of its virtual file.
        self.sources.append(name if self.rng.random() < 0.5 else f"{stem}.safetensors")
        return tensors

    # Rules for the tensors before a step, and what rules make of them.

    def any_only(self, tensors):
        return any_glob(self.rng, tensors)

    def do_only(self, globs):
        kept = {name for glob in globs for name in matched(glob, self.before_step)}
        return {name: tensor for name, tensor in self.before_step.items() if name in kept}

    def any_drop(self, tensors):
        return any_glob(self.rng, tensors)

    def do_drop(self, globs):
        # A glob may also match names that `only` leaves out, which changes nothing.
        dropped = {name for glob in globs for name in matched(glob, self.before_step)}
        return {name: tensor for name, tensor in self.before_step.items() if name not in dropped}

    def any_rename(self, tensors):
        start, _, end = self.rng.choice(sorted(tensors)).partition(".")
        match, to = self.rng.choice([
            (f"^{re.escape(start)}\\.", ""), ("^", "model.$$"), (r"^(\w+)\.(.*)$", "$2.$1"), (r"\.(\d+)\.", "_${1}_"),
            (r"(?P<kind>w|weight|bias)", "${kind}{}"), (r"model|x", "transformer"), (r"[aeiou](\w)?", "<${1}>"),
        ])  # fmt: skip
        return {"match": match, "to": to}

    def do_rename(self, rules):
        named = [(name, tensor) for name, tensor in self.before_step.items()]
        for rule in rules:
            pattern = re.compile(rule["match"])
            if not any(pattern.search(name) for name, _ in named):
                return None
            named = [
                (pattern.sub(lambda match, rule=rule: expand(rule["to"], match), name, count=1), tensor)
                for name, tensor in named
            ]
        return dict(named) if len({name for name, _ in named} - {""}) == len(named) else None

    def any_slice(self, tensors):
        rng = self.rng
        glob = any_glob(rng, tensors)
        chosen = [tensors[name] for name in matched(glob, tensors)]
        axes = min(tensor.dim() for tensor in chosen)
        if not axes:
            return None
        parts = rng.randint(1, 5)
        where = {"part": f"{rng.randint(1, parts)}/{parts}"}
        if rng.random() < 0.5:
            size = min(min(tensor.shape[-axes:]) for tensor in chosen)
            where = {"range": sorted([rng.randint(0, size), rng.randint(0, size)])}
        return {"tensors": glob, "dim": rng.randrange(-axes, axes), **where}

    def do_slice(self, rules):
        tensors = dict(self.before_step)
        for rule in rules:
            for name in matched(rule["tensors"], tensors):
                raw = bits(tensors[name])
                if "range" in rule:
                    start, end = rule["range"]
                    if end > raw.shape[rule["dim"]]:
                        return None
                    part = raw.narrow(rule["dim"], start, end - start)
                else:
                    number, parts = map(int, rule["part"].split("/"))
                    chunks = raw.chunk(parts, rule["dim"])
                    if number > len(chunks):
                        return None
                    part = chunks[number - 1]
                tensors[name] = part.contiguous().view(tensors[name].dtype)
        return tensors

    def any_split(self, tensors):
        rng = self.rng
        name = rng.choice(sorted(tensors))
        dims = tensors[name].dim() - (tensors[name].dtype is PACKED)
        if dims < 1 or max(tensors[name].shape) > 40:
            return None
        way = rng.choice([
            {"tensors": re.sub(r"[*?[]", lambda found: f"[{found[0]}]", name), "to": f"{name.replace('$', '$$').replace('{}', '')}.{{}}"},
            {"match": f"({re.escape(name[: len(name) // 2])})(.*)", "to": "$1{}.${2}{x}"},
        ])  # fmt: skip
        dim = rng.randrange(dims)
        return {**way, "dim": rng.choice([dim, dim - tensors[name].dim()])}

    def do_split(self, rules):
        named = list(self.before_step.items())
        for rule in rules:
            split = []
            for name, tensor in named:
                is_match = fnmatch.fnmatchcase(name, rule["tensors"]) if "tensors" in rule else False
                match = re.fullmatch(rule["match"], name) if "match" in rule else is_match and re.fullmatch("(?s).*", name)
                if not match:
                    split.append((name, tensor))
                    continue
                dim = rule["dim"]
                if not -tensor.dim() <= dim < tensor.dim() or tensor.dtype is PACKED and dim % tensor.dim() == tensor.dim() - 1:
                    return None
                if not bits(tensor).shape[dim]:
                    return None
                for number, part in enumerate(bits(tensor).unbind(dim)):
                    split.append((expand(rule["to"], match, number), part.contiguous().view(tensor.dtype)))
            if split == named:
                return None
            named = split
        return dict(named) if named and len(dict(named)) == len(named) else None

    def any_stack(self, tensors):
        rng = self.rng
        named = [name for name in sorted(tensors) if re.search(r"\d", name)]
        if not named:
            return None
        name = rng.choice(named)
        number = rng.choice(list(re.finditer(r"\d+", name)))
        before, after = name[: number.start()], name[number.end() :]
        pattern = f"{re.escape(before)}(\\d+){re.escape(after)}"
        if rng.random() < 0.3:
            return {"tensors": f".*?(\\d+){re.escape(after)}", "to": "stacked"}
        if rng.random() < 0.3 and after:
            return {"tensors": f"{re.escape(before)}(\\d+)(?P<rest>.+)", "to": "stack${rest}"}
        return {"tensors": pattern, "to": rng.choice(["stacked", f"stacked {len(before)}"])}

    def do_stack(self, rules):
        tensors = self.before_step
        for rule in rules:
            stacks, others = {}, []
            for name, tensor in tensors.items():
                if match := re.fullmatch(rule["tensors"], name):
                    if not match[1].isascii() or int(match[1]) in stacks.setdefault(expand(rule["to"], match), {}):
                        return None
                    stacks[expand(rule["to"], match)][int(match[1])] = tensor
                else:
                    others.append((name, tensor))
            for name, members in stacks.items():
                parts = [members[n] for n in sorted(members)]
                is_whole = sorted(members) == list(range(len(parts)))
                if not is_whole or len({(part.dtype, part.shape) for part in parts}) > 1:
                    return None
                others.append((name, torch.stack(list(map(bits, parts))).view(parts[0].dtype)))
            if not stacks or len(dict(others)) < len(others):
                return None
            tensors = dict(others)
        return tensors

    def any_cast(self, tensors):
        glob = any_glob(self.rng, tensors)
        chosen = [tensors[name].dtype for name in matched(glob, tensors)]
        targets = [dtype for dtype in DTYPES if all(has_cast(one, dtype) for one in chosen) and dtype is not PACKED]
        # Floats are chosen more often, as all can be cast to one another.
        targets += [dtype for dtype in targets if name_of(dtype) in FLOATS] * 3
        return {"tensors": glob, "to": name_of(self.rng.choice(targets))} if targets else None

    def do_cast(self, rules):
        made = {}
        for name, tensor in self.before_step.items():
            last = [rule["to"] for rule in rules if fnmatch.fnmatchcase(name, rule["tensors"])][-1:]
            made[name] = cast(tensor, getattr(torch, last[0])) if last else tensor
        return made


def to_toml(value):
    """A value of a recipe as TOML on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {to_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def file_of(path, sources, steps):
    """A file of a recipe as TOML."""
    lines = {"path": path, "from": sources, **steps}
    return "[[file]]\n" + "".join(f"{key} = {to_toml(value)}\n" for key, value in lines.items())
