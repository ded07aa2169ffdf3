"""The recipe of `docs/CORE.md` for a drafter, carried out in a copy of the sources."""

from copied import change, copy_tree, run_in

CHECK = """
from kit import make_drafting_engine, make_engine, metric_total, metric_values, running_server

texts = []
for engine in (make_engine(), make_drafting_engine(speculation="suffix")):
    with running_server(engine) as server, server.client() as client:
        body = {"prompt": "abc", "max_tokens": 20, "seed": 1, "ignore_eos": True}
        texts.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
        server.assert_quiescent()
        values = metric_values(client)
assert texts[0] == texts[1]
assert metric_total(values, "shiftjax:draft_tokens_total", drafter="again") > 0
assert metric_total(values, "shiftjax:draft_tokens_total", drafter="suffix") == 0
"""


def test_a_drafter_takes_one_file_and_changes_no_token(tmp_path):
    copy = copy_tree(tmp_path)
    old = "        corpus = self._corpora.get(sequence.corpus)\n"
    new = """\
        again = Guess(tail[-1:].tolist() * most, [0.9] * most, 0)
        drafts.append(self._rated(sequence, again, "again", "again"))
"""
    change(copy, "shiftjax/drafts/drafting.py", old, new + old)
    run_in(copy, CHECK)
