// One streamed and one unstreamed request over gRPC; prints what came as JSON.
// node client.js ADDRESS PROTO TEXT
"use strict";
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, proto, text] = process.argv.slice(2);
const definition = loader.loadSync(proto, { keepCase: true, longs: Number, enums: String });
const { Inference } = grpc.loadPackageDefinition(definition).shiftjax.v1;
const client = new Inference(address, grpc.credentials.createInsecure());
const request = { text, sampling: { max_tokens: 30, seed: 3, ignore_eos: true } };

const result = { text: "", kinds: [] };
const stream = client.Generate(request);
stream.on("data", (event) => {
  const [kind] = Object.keys(event);
  if (result.kinds.at(-1) !== kind) result.kinds.push(kind);
  if (event.delta) result.text += event.delta.text ?? "";
  if (event.finished) result.reason = event.finished.reason;
});
stream.on("end", () => {
  client.GenerateOnce(request, (error, answer) => {
    if (error) throw error;
    result.once = answer.completions[0].text;
    client.GenerateOnce({ text: "" }, (refused) => {
      result.code = grpc.status[refused.code];
      console.log(JSON.stringify(result));
      client.close();
    });
  });
});
