"""Flags of vLLM 0.29, SGLang and Arctic Inference, and what each becomes here. No JAX.

A name that ends with = takes a value; any other is a switch, which `--no-...` turns off.
"""

from serving.run.speculative_config import METHODS
from serving.server.options import MAX_LOGPROBS

ALIASES = {
    "--gpu-memory-utilization=": "--memory-fraction",
    "--mem-fraction-static=": "--memory-fraction",
    "--num-gpu-blocks-override=": "--num-blocks",
    "--max-num-scheduled-tokens=": "--max-num-batched-tokens",
    "--ulysses-sequence-parallel-size=": "--sp",
    "-tp=": "--tp",
    "-pp=": "--pp",
    "-dp=": "--dp",
    "--tp-size=": "--tp",
    "--dp-size=": "--dp",
    "--pp-size=": "--pp",
    "-q=": "--quantization",
    "-n=": "--hosts",
    "-r=": "--host-rank",
    "--nnodes=": "--hosts",
    "--node-rank=": "--host-rank",
    "--dist-init-addr=": "--coordinator",
    "--context-length=": "--max-model-len",
    "--model-path=": "--model",
    "--lora-paths=": "--lora-modules",
    "--max-loras-per-batch=": "--max-loras",
    "--max-loaded-loras=": "--max-cpu-loras",
    "--tokenizer-path=": "--tokenizer",
    "--random-seed=": "--seed",
    "--max-running-requests=": "--max-num-seqs",
    "--chunked-prefill-size=": "--max-num-batched-tokens",
    "--page-size=": "--block-size",
    "--preferred-sampling-params=": "--override-generation-config",
    "-sc=": "--speculative-config",
    "--spec-model=": "--draft-model",
    "--speculative-draft-model-path=": "--draft-model",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-overlap-schedule": "--no-overlap",
    "--async-scheduling": "--overlap",
    "--no-async-scheduling": "--no-overlap",
}
# Values of other engines, for settings of theirs and for those that have the same name here.
VALUES = {
    "--dtype": {"half": "float16", "float": "float32"},
    # A checkpoint says how it is quantised.
    "--quantization": {
        **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "moe_wna16"), "auto"),
        **dict.fromkeys(("compressed-tensors", "modelopt", "fbgemm_fp8"), "auto"),
    },
    "--runner": {"pooling": "--task embed", "generate": "--task generate", "auto": "--task auto"},
    "--convert": {"embed": "--task embed", "none": "--task auto", "auto": "--task auto"},
    "--generation-config": {"vllm": "none"},
    "--sampling-defaults": {
        "model": "--generation-config auto",
        "openai": "--generation-config none",
    },
    "--spec-method": {name: f"--speculation {ours}" for name, ours in METHODS.items()},
    "--reasoning-parser": {
        # Thoughts between <think> and </think>, where the prompt or the model opens them.
        **dict.fromkeys(("qwen3", "glm45", "glm47", "kimi_k2", "deepseek_v3"), "think"),
        **dict.fromkeys(("deepseek-v3", "deepseek_v4", "ernie45", "holo2", "mimo"), "think"),
        **dict.fromkeys(("nemotron_v3", "nemotron_3", "olmo3", "step3p5", "interns1"), "think"),
        # The same where an output begins with thoughts although nobody opened them.
        **dict.fromkeys(("deepseek-r1", "minimax_m2", "minimax", "step3"), "deepseek_r1"),
        **{"qwen3-thinking": "deepseek_r1", "gpt-oss": "openai_gptoss"},
    },
    "--tool-call-parser": {
        **{"llama3": "llama3_json", "gpt-oss": "openai", "qwen": "hermes", "qwen25": "hermes"},
        **dict.fromkeys(("qwen3_xml", "mimo", "step3p5"), "qwen3_coder"),
        **{"deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "glm": "glm45"},
        "minimax-m2": "minimax_m2",
    },
}
# vLLM takes several words or a JSON list; a setting here has commas.
LISTS = ("--served-model-name", "--allowed-origins")
MODULES = ("--lora-modules", "--lora-paths")  # several words, or JSON objects, too
MOST = {"--max-logprobs": MAX_LOGPROBS}  # a larger value is this one, and told of
SIZES = {"--kv-offloading-size": "--host-memory"}  # GiB

# Why a flag has no effect: the flags.
IGNORED = {
    "steps are compiled ahead of traffic": (
        "--enforce-eager --disable-cuda-graph --enable-torch-compile --compilation-config= -cc= "
        "--optimization-level= --cuda-graph-max-bs= --max-seq-len-to-capture= "
        "--max-cudagraph-capture-size= --jit-monitor-mode= --jit-monitor-verbose"
    ),
    "kernels are chosen at the start, `shiftjax doctor` shows which": (
        "--kernel-config= --linear-backend= --moe-backend= --all2all-backend= --ir-op-priority= "
        "--enable-flashinfer-autotune --enable-bf16x3-router-gemm --sampling-backend= "
        "--disable-cascade-attn"
    ),
    "the mode of each step follows the load": "--performance-mode=",
    "the engine always shifts between --sp and tensor parallelism": "--enable-shift-parallel",
    "XLA chooses how devices exchange": "--disable-custom-all-reduce --enable-cumem-allocator",
    "XLA overlaps exchange with computation": (
        "--enable-dbo --ubatch-size= --dbo-decode-token-threshold= --dbo-prefill-token-threshold="
    ),
    "one process drives all devices of a host": (
        "--distributed-executor-backend= --data-parallel-backend= -dpb= --worker-use-ray "
        "--disable-nccl-for-dp-synchronization --ray-workers-use-nsight"
    ),
    "JAX's own time limits hold": (
        "--distributed-timeout-seconds= --cpu-distributed-timeout-seconds="
    ),
    "JAX uses the devices that it finds (JAX_PLATFORMS)": "--device=",
    "experts are divided as the layers around them": (
        "--enable-expert-parallel -ep --enable-ep-weight-filter --expert-placement-strategy="
    ),
    "one process serves all connections": ("--api-server-count= -asc= --renderer-num-workers="),
    "weights are read from safetensors, GGUF or Orbax, whichever is there": (
        "--load-format= --model-loader-extra-config= --safetensors-load-strategy= "
        "--safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= "
        "--pt-load-map-location= --ignore-patterns="
    ),
    "weights are read in ranges, for each device its own": "--max-parallel-loading-workers=",
    "a start shows its progress on a terminal": "--use-tqdm-on-load",
    "the configuration is found by its file's name": "--config-format=",
    "there is one tokenizer backend": "--tokenizer-mode= --cohere-format=",
    "there is one implementation of each model": "--model-impl=",
    "no code of a checkpoint is ever run": "--trust-remote-code --code-revision=",
    "preempted requests are recomputed; --preemption swap keeps them": "--swap-space=",
    "requests run by priority, then by arrival and length": (
        "--scheduling-policy= --schedule-policy="
    ),
    "prompts are always computed in chunks": "--enable-chunked-prefill --enable-mixed-chunk",
    "a step computes parts of as many prompts as fit": (
        "--max-num-partial-prefills= --max-long-partial-prefills= "
        "--long-prefill-token-threshold= --prefill-schedule-interval= --scheduler-reserve-full-isl"
    ),
    "adapters have the numbers of activations": "--lora-dtype auto",
    "factors of adapters are always split as the weights that they change": "--fully-sharded-loras",
    "there is one block manager": "--use-v2-block-manager --disable-hybrid-kv-cache-manager",
    "blocks are found by BLAKE2b": "--prefix-caching-hash-algo= --prefix-match-unit=",
    "layers that reuse KV are known by the checkpoint": "--kv-sharing-fast-prefill",
    "KV goes to host memory": "--kv-offloading-backend=",
    "there are no layers with a recurrent state": (
        "--mamba-backend= --mamba-ssu-algorithm= --enable-mamba-cache-stochastic-rounding "
        "--mamba-cache-philox-rounds= --mamba-cache-dtype= --mamba-ssm-cache-dtype= "
        "--mamba-block-size= --mamba-cache-mode= --replayssm-buffer-len= --use-replayssm "
        "--gdn-prefill-backend= --kda-prefill-backend= --prefix-cache-retention-interval="
    ),
    "there is one grammar backend, llguidance": (
        "--structured-outputs-config= --guided-decoding-backend= --grammar-backend="
    ),
    "there are no models of late interaction": "--enable-flash-late-interaction",
    "there is one sampler": "--enable-batch-sharded-sampling",
    "a draw depends on seed, position and token alone": "--use-fp64-gumbel",
    "the marks of thoughts are those of the reasoning parser": "--reasoning-config=",
    "tools are called where requests bring some": "--enable-auto-tool-choice",
    "tools are left out of the prompt then": "--exclude-tools-when-tool-choice-none",
    "the template's own format is found": "--chat-template-content-format=",
    "the role of an answer is assistant": "--response-role=",
    "the server logs one line per event": (
        "--uvicorn-log-level= --log-level= --log-level-http= --aggregate-engine-logging "
        "--enable-logging-iteration-details --log-error-stack"
    ),
    "requests are logged by their id and times alone": (
        "--enable-log-requests --disable-log-requests --max-log-len= --enable-log-outputs "
        "--enable-log-deltas"
    ),
    "there is no log of accesses": (
        "--disable-uvicorn-access-log --disable-access-log-for-endpoints="
    ),
    "statistics are at /metrics": (
        "--disable-log-stats --enable-metrics --show-hidden-metrics-for-version= "
        "--kv-cache-metrics --kv-cache-metrics-sample= --cudagraph-metrics --enable-mfu-metrics "
        "--per-request-spec-decode-metrics="
    ),
    "usage always has prompt_tokens_details": (
        "--enable-prompt-tokens-details --enable-cache-report"
    ),
    "answers always have X-Request-Id": "--enable-request-id-headers",
    "system_fingerprint is null": "--fingerprint-mode= --fingerprint-value=",
    "the endpoint is always there": (
        "--enable-server-load-tracking --enable-tokenizer-info-endpoint --tokens-only"
    ),
    "there are no pages of documentation, /openapi.json is always there": (
        "--disable-fastapi-docs --enable-offline-docs"
    ),
    "CORS allows what the endpoints take, never cookies": (
        "--allow-credentials --allowed-methods= --allowed-headers="
    ),
    "SIGHUP reads certificates again": "--enable-ssl-refresh",
    "the first step is run before requests are taken": "--skip-server-warmup",
    "settings of other engines' variables are named in the log": "--fail-on-environ-validation",
    "there are no images, audio or video": (
        "--limit-mm-per-prompt= --mm-processor-kwargs= --mm-processor-cache-gb= "
        "--allowed-local-media-path= --allowed-media-domains= --language-model-only "
        "--media-io-kwargs= --mm-processor-cache-type= --mm-hasher-algorithm= "
        "--mm-shm-cache-max-object-size-mb= --mm-encoder-tp-mode= --mm-encoder-attn-backend= "
        "--mm-attention-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= "
        "--mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= "
        "--interleave-mm-strings --skip-mm-profiling --video-pruning-rate= "
        "--video-pruning-method= --mm-tensor-ipc= --mm-processor-device= --mm-ipc-gpu-memory-gb= "
        "--mm-device-do-normalize --disable-chunked-mm-input --ec-manager-config="
    ),
}
# What to use instead of a flag that is refused: the flags. Of NAME VALUE that value alone is.
REFUSED = {
    "adapters have the numbers of activations, as --dtype says": "--lora-dtype=",
    "adapters may change all matrices that they can": "--lora-target-modules=",
    "adapters change texts alone": "--enable-tower-connector-lora --default-mm-loras=",
    "use --lora-experts": "--enable-mixed-moe-lora-format --enable-moe-shared-loras",
    "all slots of adapters are compiled": "--specialize-active-lora",
    "models with images, audio or video are not served": (
        "--enable-multimodal --enable-mm-embeds --mm-encoder-only"
    ),
    "prefill and decode share devices here; --phases divides batches": (
        "--kv-transfer-config= --disaggregation-mode= --ec-transfer-config="
    ),
    "use --hosts, --host-rank and --coordinator": (
        "--data-parallel-address= -dpa= --data-parallel-rpc-port= -dpp= "
        "--data-parallel-size-local= -dpl= --data-parallel-rank= -dpn= "
        "--data-parallel-start-rank= -dpr= --master-addr= --master-port= --headless"
    ),
    "one server has all its groups: start others by themselves, behind a router": (
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe "
        "--data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port= "
        "--dp-supervisor-probe-interval-s= --dp-supervisor-probe-timeout-s= "
        "--dp-supervisor-probe-failure-threshold="
    ),
    "KV is split by heads over sp * tp devices": (
        "--decode-context-parallel-size= -dcp= --dcp-comm-backend= --dcp-q-replicate "
        "--dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size="
    ),
    "use --sp, which splits the tokens of a prompt": "--prefill-context-parallel-size= -pcp=",
    "use --fleet, whose groups come and go": "--enable-elastic-ep",
    "with --hosts and --dp a lost host costs its groups; else it ends the engine": (
        "--enable-fault-tolerance --fault-tolerance-config="
    ),
    "experts are divided evenly": "--enable-eplb --eplb-config=",
    "set CUDA_VISIBLE_DEVICES": "--device-ids=",
    "start the server with numactl": "--numa-bind --numa-bind-nodes= --numa-bind-cpus=",
    "weights stay on devices: use more TP, or --quantization fp8": (
        "--cpu-offload-gb= --cpu-offload-params= --offload-backend= --offload-group-size= "
        "--offload-num-in-group= --offload-prefetch-step= --offload-params="
    ),
    "use --num-blocks or --memory-fraction": "--kv-cache-memory-bytes=",
    "sequences start while there are KV blocks: use --max-num-seqs": "--watermark=",
    "all layers' KV has one format": "--kv-cache-dtype-skip-layers=",
    "use --token-buckets 8,64,256": "--cuda-graph-sizes= --cudagraph-capture-sizes=",
    "use --attention auto, pallas or xla": "--attention-backend= --attention-config= -ac=",
    "name the model random:MODEL, whose weights are made up": "--load-format dummy",
    "download the tokenizer and name its file with --tokenizer": "--tokenizer-revision=",
    "set HF_TOKEN, or log in with `hf auth login`": "--hf-token=",
    "change config.json in a copy of the checkpoint's directory": (
        "--hf-overrides= --hf-config-path= --rope-scaling= --rope-theta= "
        "--disable-sliding-window --model-class-overrides="
    ),
    "a checkpoint says how it is quantised; --quantization fp8 makes codes": (
        "--quantization-config= --quantization-param-path= --allow-deprecated-quantization"
    ),
    "a checkpoint says how texts are pooled (1_Pooling/config.json)": (
        "--pooler-config= --override-pooler-config= --convert= --runner="
    ),
    "answers have log-probabilities, never logits": (
        "--logprobs-mode raw_logits --logprobs-mode processed_logits"
    ),
    "use --kv-events-endpoint tcp://*:5557 and --kv-events-topic": "--kv-events-config=",
    "use --profile-dir": "--profiler-config= --enable-layerwise-nvtx-tracing",
    "use --control-key-file: /sleep and /wake_up are there then": "--enable-sleep-mode",
    "use --control-key-file, and POST /update_weights with a path": (
        "--weight-transfer-config= --custom-weight-loader="
    ),
    "a scheduler or worker is not replaced: docs/CORE.md says what plugs in": (
        "--scheduler-cls= --worker-cls= --worker-extension-cls= --io-processor-plugin= "
        "--additional-config="
    ),
    "put a proxy in front of the server": "--middleware=",
    "use one of the parsers of --tool-parser": "--tool-parser-plugin=",
    "use one of the parsers of --reasoning-parser": "--reasoning-parser-plugin=",
    "clients run the tools": "--tool-server=",
    "use --host and --port behind a proxy that listens on the socket": "--uds=",
    "use logit_bias, allowed_token_ids or structured outputs": "--logits-processors=",
    f"use --speculation, or --speculative-config with a method of {', '.join(METHODS)}": (
        "--speculative-algorithm= --spec-method= --speculative-num-steps= "
        "--speculative-eagle-topk= --speculative-num-draft-tokens= --spec-tokens="
    ),
    "models that diffuse texts are not served": "--diffusion-config= -dc=",
    "send token ids to /inference/v1/generate": "--skip-tokenizer-init",
    "send return_tokens_as_token_ids in requests": "--return-tokens-as-token-ids",
    "send timeline: true in requests": "--enable-per-request-metrics",
    "prompts are texts and token ids": "--enable-prompt-embeds",
    "answers do not tell what happened inside a step": (
        "--return-sampling-mask --enable-trace-replay"
    ),
    "chat templates of requests are refused: use --chat-template": "--trust-request-chat-template",
    "streams send tokens alone: raise the time limit of the proxy": "--sse-keep-alive-interval=",
    "Cohere's endpoint is not there": "--cohere-is-reasoning-model",
    "the server asks clients for certificates of --ssl-ca-certs, or for an --api-key": (
        "--ssl-cert-reqs="
    ),
    "TLS has the ciphers of Python's defaults": "--ssl-ciphers=",
    "use --max-request-bytes": "--h11-max-incomplete-event-size= --h11-max-header-count=",
    "the server logs to stderr": "--log-config-file=",
    "spans have queue, prefill and decode": "--collect-detailed-traces=",
}
