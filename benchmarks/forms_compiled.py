"""How many kernels a campaign on a card compiles for its forms, without a card.

    python benchmarks/forms_compiled.py [--cases 480] [--seed 0] [--chip sm_90] [TARGET]

Draws the cases that `fa-verify check TARGET --backend cuda` draws (default: the project's flash),
notes what each launches for the chip, with the configuration pinned that the campaign pins, and
prints how many different kernels there are after each shard of them, by form and function, and
which constants and arguments tell kernels of one form and function apart. What reruns launch
beside the case itself (wider heads) is not looked at.
"""

from __future__ import annotations

import argparse
import collections
import itertools

from fa_verify.resources import work

_MOST = 1 << 21  # elements of q or k: larger cases launch nothing that small ones do not


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", default="kernels/flash_attention.py:flash")
    parser.add_argument("--cases", type=int, default=480)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chip", default="sm_90")
    options = parser.parse_args()
    work.start(options.chip)
    from fa_verify import campaign, loader
    from fa_verify.campaign.cases import CUDA_FORMS, SHARD, drawn
    from fa_verify.resources.chips import CHIPS
    from fa_verify.resources.compiled import key
    from fa_verify.resources.launches import launched

    (kernel,) = loader.load(options.target)
    plan = campaign.Plan(backend="cuda", cases=options.cases, seconds=None, seed=options.seed)
    found, growth = {}, []
    for index, (case, setup) in enumerate(drawn(kernel, plan)):
        p = case.problem
        if max(p.heads_q * p.seqlen_q, p.heads_kv * p.seqlen_k) * p.batch * p.head_dim <= _MOST:
            for one in launched(kernel, case, setup.config).kernels:
                place = (index % CUDA_FORMS, one.name)
                facts = {**one.constants, **one.arguments, **one.options}
                found.setdefault(key(one, CHIPS[options.chip]), (place, facts))
        if index % SHARD == SHARD - 1:
            growth.append(len(found))
    print(f"different kernels after each {SHARD} cases: {growth}; in all {len(found)}")
    groups = collections.defaultdict(list)
    for place, facts in found.values():
        groups[place].append(facts)
    for (form, name), own in sorted(groups.items()):
        names = sorted(set(itertools.chain(*own)))
        differ = [n for n in names if len({str(facts.get(n)) for facts in own}) > 1]
        print(f"form {form:2} {name:20}{len(own):4}  {', '.join(differ)}")


if __name__ == "__main__":
    main()
