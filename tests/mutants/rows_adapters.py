"""Mutants of adapters: what is added to products, which slot has it, and who waits."""

from mutant import Mutant

LORA = "shiftjax/models/lora.py"
OPERANDS = "shiftjax/models/operands.py"
EXPERTS = "shiftjax/models/expert_lora.py"
POOL = "shiftjax/adapters/pool.py"
SLOTS = "shiftjax/adapters/slots_device.py"
PEFT = "shiftjax/weights/peft.py"
FOLDER = "shiftjax/adapters/folder.py"
PACK = "shiftjax/device/pack.py"
SERVICE = "serving/server/service.py"
ROUTES = "serving/http/adapters.py"
TOLD = "shiftjax/adapters/state_told.py"
TEST = "tests/adapters/test_adapters.py"
TEST_POOL = "tests/adapters/test_pool.py"
TEST_PEFT = "tests/weights/test_peft.py"
TEST_HTTP = "tests/serving/http/test_adapters_http.py"
TEST_TOLD = "tests/adapters/test_state_told.py"

ROWS = (
    Mutant(
        "a token has what other slots hold, too",
        "adapters",
        OPERANDS,
        "jnp.where(groups.own[:, None] == group[None], values, 0)",
        "jnp.where(groups.own[:, None] == group[None], values, values)",
        (TEST,),
        "requests say what adapters of others make of them",
    ),
    Mutant(
        "all matrices of an input have the factor of the first",
        "adapters",
        LORA,
        "together.index(name)",
        "0",
        (TEST,),
        "k and v have the adapter of q",
    ),
    Mutant(
        "experts have one slot for all",
        "adapters",
        EXPERTS,
        "expert * (self.num_slots + 1) + slot + 1",
        "expert * (self.num_slots + 1) + 1",
        (TEST,),
        "pairs that are sent have the first adapter",
    ),
    Mutant(
        "padding has the first adapter's slot",
        "adapters",
        PACK,
        "np.repeat(adapters, lens)",
        "np.repeat(np.maximum(adapters, 0), lens)",
        (TEST,),
        "requests without an adapter get one",
    ),
    Mutant(
        "a running sequence loses its slot",
        "adapters",
        POOL,
        "unused = [slot for slot in slots if self._held[slot] not in in_use]",
        "unused = list(slots)",
        (TEST_POOL,),
        "a sequence goes on with another adapter",
    ),
    Mutant(
        "the most recently used slot gives way",
        "adapters",
        POOL,
        "return min(unused, key=self._last_used)",
        "return max(unused, key=self._last_used)",
        (TEST_POOL,),
        "adapters in use are brought again and again",
    ),
    Mutant(
        "promises are not kept",
        "adapters",
        POOL,
        "return not self._is_promised_to_another(self._held.index(key), key)",
        "return True",
        (TEST_POOL,),
        "an adapter waits for as long as others ask for what its slot holds",
    ),
    Mutant(
        "promises to who has gone stay",
        "adapters",
        POOL,
        "        del self._promised[slot]\n        return False",
        "        return True",
        (TEST_POOL,),
        "an aborted request blocks a slot for good",
    ),
    Mutant(
        "host memory keeps all adapters",
        "adapters",
        POOL,
        "                if entry.job is None:\n                    entry.adapter = None",
        "                pass",
        (TEST_POOL,),
        "host memory grows with every adapter",
    ),
    Mutant(
        "a file that has changed is taken for the one that was loaded",
        "adapters",
        POOL,
        "if adapter.key != entry.key:",
        "if False:",
        (TEST_POOL,),
        "KV of one adapter is used with another",
    ),
    Mutant(
        "what was unloaded stays",
        "adapters",
        POOL,
        "                del self._entries[key]",
        "                pass",
        (TEST_POOL,),
        "host memory grows with every adapter",
    ),
    Mutant(
        "factors of less rank are not padded with zeros",
        "adapters",
        SLOTS,
        "wide = np.zeros((matrix.shape[0], rank), matrix.dtype)",
        "wide = np.ones((matrix.shape[0], rank), matrix.dtype)",
        (TEST,),
        "an adapter has more rank than its own",
    ),
    Mutant(
        "rslora's scale is lora's",
        "adapters",
        PEFT,
        "math.sqrt(rank) if self.by_root else rank",
        "rank",
        (TEST_PEFT,),
        "adapters are too weak",
    ),
    Mutant(
        "alpha_pattern is not read",
        "adapters",
        PEFT,
        "        alpha = next(found, self.alpha)",
        "        alpha = self.alpha",
        (TEST_PEFT,),
        "some modules are too strong",
    ),
    Mutant(
        "parts of a stack have its first rows",
        "adapters",
        PEFT,
        "scaled[place.range_of(slice(0, own.outputs))]",
        "scaled[: own.outputs]",
        (TEST_PEFT,),
        "k has the factor of q",
    ),
    Mutant(
        "numbers that are not finite are served",
        "adapters",
        PEFT,
        "if not np.isfinite(values.astype(np.float32)).all():",
        "if False:",
        (TEST_PEFT,),
        "an adapter of NaNs ends its requests",
    ),
    Mutant(
        "links lead out of the folder",
        "adapters",
        FOLDER,
        "found = (root / path).resolve()",
        "found = root / path",
        (TEST_PEFT,),
        "clients read directories that are none of theirs",
    ),
    Mutant(
        "requests over HTTP and gRPC have no adapter",
        "adapters",
        SERVICE,
        "adapter = model.adapter_of(fields.model)",
        "adapter = None",
        (TEST_HTTP,),
        "the model answers for its adapters",
    ),
    Mutant(
        "unloading takes adapters from those who have them",
        "adapters",
        POOL,
        "                gone.discard(key)",
        "                pass",
        (TEST_HTTP,),
        "a request that runs ends with the engine",
    ),
    Mutant(
        "errors tell where the folder of adapters is",
        "adapters",
        ROUTES,
        "str(error).replace(str(path), fields.lora_path) if path.name else str(error)",
        "str(error)",
        (TEST_HTTP,),
        "clients learn the directories of the server",
    ),
    Mutant(
        "a label has the names of all adapters",
        "adapters",
        TOLD,
        "[:MOST_NAMED]",
        "",
        (TEST_TOLD,),
        "a line of metrics grows with every adapter that is waited for",
    ),
)
