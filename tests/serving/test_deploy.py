"""What is under deploy/ names metrics, flags and paths that exist; Prometheus itself agrees."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from cases.load_kit import free_port
from kit import make_drafting_engine, running_server

from serving.cli.main import make_parser
from shiftjax.config import SETTINGS
from shiftjax.settings import resolve

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMTOOL = shutil.which("promtool")
PROMETHEUS = shutil.which("prometheus")


@pytest.fixture(scope="module")
def metrics() -> str:
    """What a server that drafts shows when it has done something."""
    with (
        running_server(make_drafting_engine(speculation="ngram"), grpc=False) as server,
        server.client() as client,
    ):
        client.post("/v1/completions", json={"prompt": "x"})
        client.post("/v1/completions", json={"prompt": ""})
        return client.get("/metrics").text


def names_in(text: str) -> set[str]:
    """Metrics that expressions use, without their prefix."""
    return set(re.findall(r"(?:shiftjax|\$prefix):([a-z0-9_]+)", text))


def test_dashboard_and_alerts_name_what_there_is(metrics):
    known = {line.split("{")[0].split(" ")[0] for line in metrics.splitlines() if line[:1] != "#"}
    known = {name.removeprefix("shiftjax:") for name in known}
    dashboard = json.loads((DEPLOY / "grafana/shiftjax.json").read_text())
    alerts = (DEPLOY / "prometheus/alerts.yml").read_text()
    panels = plain_panels(dashboard)
    used = names_in(json.dumps(panels)) | names_in(alerts)
    assert len(used) > 25
    assert used <= known
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) > 30


def test_panels_have_an_expression_and_a_place_of_their_own():
    dashboard = json.loads((DEPLOY / "grafana/shiftjax.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel.get("targets", ()):
            assert 'model_name=~"$model"' in target["expr"], panel["title"]


def plain_panels(dashboard: dict) -> list[dict]:
    """Those that any server has numbers for; tests/serving/clients has one with a fleet."""
    panels = dashboard["panels"]
    return [p for p in panels if p["type"] != "row" and not p["title"].startswith("Fleet")]


@pytest.mark.parametrize("name", ["kubernetes/base/server.yaml", "llm-d.yaml"])
def test_the_manifests_name_what_there_is(name):
    documents = yaml.safe_load_all((DEPLOY / name).read_text())
    kinds = {document["kind"]: document for document in documents}
    template = kinds["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    arguments = make_parser().parse_args(container["args"])
    delay = float(arguments.drain_delay)
    ready = container["readinessProbe"]
    assert delay >= ready["periodSeconds"] * ready["failureThreshold"]
    drain = delay + float(arguments.shutdown_timeout)
    assert drain < template["spec"]["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports["http"], ports["grpc"]) == (8000, 50051)  # the defaults of `serve`
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness")}
    with running_server(grpc=False) as server, server.client() as client:
        assert all(client.get(path).status_code == 200 for path in probes)
    if (pool := kinds.get("InferencePool")) is not None:
        spec = pool["spec"]
        assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert spec["targetPorts"] == [{"number": ports["http"]}]
        assert arguments.metrics_prefix == template["metadata"]["labels"]["llm-d.ai/engine-type"]
        assert arguments.kv_events == "zmq"
        assert arguments.kv_events_endpoint == f"tcp://*:{ports['kv-events']}"


@pytest.fixture(scope="module")
def scaling() -> dict[str, dict]:
    """The manifests of deploy/kubernetes by kind."""
    files = (path for path in (DEPLOY / "kubernetes").rglob("*.yaml"))
    found = [each for path in files for each in yaml.safe_load_all(path.read_text())]
    return {each["kind"]: each for each in found}


def triggers_of(scaling: dict[str, dict]) -> dict[str, str]:
    return {
        each["name"]: each["metadata"]["query"]
        for each in scaling["ScaledObject"]["spec"]["triggers"]
    }


def test_the_pods_that_are_watched_and_scaled_are_those_of_the_servers(scaling, metrics):
    deployment = scaling["Deployment"]
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    monitor, scaled = scaling["PodMonitor"]["spec"], scaling["ScaledObject"]["spec"]
    for spec in (monitor, scaling["PodDisruptionBudget"]["spec"], deployment["spec"]):
        assert spec["selector"]["matchLabels"] == template["metadata"]["labels"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    keys = next(v["secret"] for v in template["spec"]["volumes"] if v["name"] == "keys")
    assert endpoint["authorization"]["credentials"]["name"] == keys["secretName"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    job = template["metadata"]["labels"][monitor["jobLabel"]]
    queries = triggers_of(scaling)
    assert set(queries) == {"queue", "kv"}
    for query in queries.values():
        (name,) = names_in(query)
        assert f'{{job="{job}"}}' in query and f"\nshiftjax:{name}{{" in metrics


def test_a_server_that_is_scaled_in_has_time_to_drain(scaling):
    """And servers are removed more slowly than added: a start takes minutes."""
    template = scaling["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    startup = container["startupProbe"]
    behavior = scaling["ScaledObject"]["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    down, up = (behavior["behavior"][name] for name in ("scaleDown", "scaleUp"))
    assert [policy["value"] for policy in down["policies"]] == [1]
    assert down["policies"][0]["periodSeconds"] > template["spec"]["terminationGracePeriodSeconds"]
    assert up["stabilizationWindowSeconds"] < down["stabilizationWindowSeconds"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200


def test_the_hosts_of_a_set_run_one_command():
    """As LeaderWorkerSet tells them who they are; a follower answers /health/live alone."""
    service, group = yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text())
    spec = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (spec[f"{role}Template"]["spec"] for role in ("leader", "worker"))
    (first,), (other,) = leader["containers"], worker["containers"]
    assert first["args"] == other["args"] and first["image"] == other["image"]
    options = make_parser().parse_args(first["args"])
    flags = {name: v for name, v in vars(options).items() if name in SETTINGS and v is not None}
    told = {"LWS_GROUP_SIZE": str(spec["size"]), "LWS_LEADER_ADDRESS": "shiftjax-0.shiftjax"}
    ports = {port["name"]: port["containerPort"] for port in first["ports"]}
    for rank in range(spec["size"]):
        host = resolve(flags, told | {"LWS_WORKER_INDEX": str(rank)}).host
        assert (host.hosts, host.host_rank) == (spec["size"], rank)
        assert host.coordinator == f"shiftjax-0.shiftjax:{ports['hosts']}"
    assert ports["jax"] == ports["hosts"] + 1
    assert other["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert not {"readinessProbe", "startupProbe"} & other.keys()
    drain = float(options.drain_delay) + float(options.shutdown_timeout)
    for pod in (leader, worker):
        assert drain < pod["terminationGracePeriodSeconds"]
    index = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    name = {"leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"]}
    assert service["spec"]["selector"] == index | name


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_reads_it():
    for kind, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        command = [str(PROMTOOL), "check", kind, str(DEPLOY / "prometheus" / file)]
        subprocess.run(command, check=True, capture_output=True)


@pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_answers_the_dashboard_and_the_autoscaler(tmp_path, scaling):
    dashboard = json.loads((DEPLOY / "grafana/shiftjax.json").read_text())
    targets = [target["expr"] for panel in plain_panels(dashboard) for target in panel["targets"]]
    targets += triggers_of(scaling).values()
    fills = {"$prefix": "shiftjax", "$model": ".*", "$__rate_interval": "5s"}
    address = f"127.0.0.1:{free_port()}"
    engine = make_drafting_engine(speculation="ngram")
    with running_server(engine, grpc=False) as server, server.client() as client:
        target = server.url.removeprefix("http://")
        config = {"global": {"scrape_interval": "200ms"}, "scrape_configs": []}
        static = [{"targets": [target]}]
        config["scrape_configs"] = [{"job_name": "shiftjax", "static_configs": static}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [str(PROMETHEUS), f"--config.file={tmp_path}/prometheus.yml"]
        command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:

            def query(text: str) -> list:
                for name, value in fills.items():
                    text = text.replace(name, value)
                try:
                    url = f"http://{address}/api/v1/query"
                    answer = client.get(url, params={"query": text})
                except httpx.TransportError:
                    return []
                if answer.status_code == 503:  # it is still starting
                    return []
                assert answer.status_code == 200, answer.text
                return answer.json()["data"]["result"]

            try:
                server.wait_until(lambda: query('up{job="shiftjax"} == 1'))
                for text in targets:

                    def is_answered(text: str = text) -> bool:
                        client.post("/v1/completions", json={"prompt": "hello"})
                        client.post("/v1/completions", json={"prompt": ""})
                        return bool(query(text))

                    server.wait_until(is_answered)
            finally:
                process.terminate()
