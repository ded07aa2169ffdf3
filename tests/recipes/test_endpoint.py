"""The recipe of `docs/CORE.md` for an endpoint, carried out in a copy of the sources."""

import pytest
from copied import change, copy_tree, run_in

CHECK = """
from kit import is_error, running_server

with running_server(keys=("key",)) as server, server.client() as stranger:
    assert stranger.get("/queue").status_code == stranger.post("/count").status_code == 401
    with server.client(headers={"authorization": "Bearer key"}) as client:
        described = client.get("/openapi.json").json()["paths"]
"""


@pytest.fixture
def copy(tmp_path):
    return copy_tree(tmp_path)


def test_an_endpoint_that_tells_takes_one_file(copy):
    file = "serving/http/info.py"
    change(
        copy,
        file,
        "\n\nINFO = {\n",
        '''

def queue(service: Service) -> dict[str, Any]:
    """Sequences that wait, and tokens of their prompts."""
    _, engine = service.running()
    return {"sequences": engine.stats.num_waiting, "tokens": engine.stats.num_waiting_tokens}


INFO = {
    "/queue": (queue, "What waits"),
''',
    )
    check = """
        assert client.get("/queue").json() == {"sequences": 0, "tokens": 0}
        assert client.post("/queue", json={}).status_code == 405
        assert list(described["/queue"]) == ["get"]
        assert described["/queue"]["get"]["summary"] == "What waits"
"""
    run_in(copy, CHECK + check)


def test_an_endpoint_that_reads_a_body_takes_two_files(copy):
    """Its fields, and a route whose handler reads them."""
    change(
        copy,
        "serving/server/fields.py",
        "class DetokenizeFields(",
        '''class CountFields(msgspec.Struct):
    """The body of /count."""

    text: str
    special: bool = True


class DetokenizeFields(''',
    )
    app = "serving/http/app.py"
    change(copy, app, "import DetokenizeFields", "import CountFields, DetokenizeFields")
    route = '            Route("/health", self.ready),\n'
    new = '            Described("/count", Raw(self.count), "Count tokens", CountFields),\n'
    change(copy, app, route, new + route)
    change(
        copy,
        app,
        "    async def detokenize(",
        '''    async def count(self, scope: Scope, receive: Receive) -> Answer:
        """POST /count."""
        values = await self._body(scope, receive)
        fields = self._service.read_plain(CountFields, values)
        ids = await self._service.texts.encode(fields.text, special=fields.special, field="text")
        return {"count": len(ids)}, unknown_names(CountFields, values)

    async def detokenize(''',
    )
    check = """
        answer = client.post("/count", json={"text": "four", "kind": "x"})
        assert answer.json() == {"count": 4} and "kind" in answer.headers["warning"]
        for wrong in ({}, {"text": 4}):
            is_error(client.post("/count", json=wrong), 400, "text")
        (schema,) = described["/count"]["post"]["requestBody"]["content"].values()
        assert schema == {"schema": {"$ref": "#/components/schemas/CountFields"}}
"""
    run_in(copy, CHECK + check)
