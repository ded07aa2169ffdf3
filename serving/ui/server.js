// What the page asks of its server. Addresses are relative: a proxy may serve it below a path.

export const $ = (id) => document.getElementById(id);

export function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// The message of an answer that is not what was asked for.
async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export async function fetchData(span) {
  const response = await fetch(`ui/data?span=${span}`, { headers: headers() });
  $("key-field").hidden = response.status !== 401 && !$("key").value;
  if (!response.ok) throw new Error(await problem(response));
  return response.json();
}

// A streamed answer: yields objects of the stream, and comments as { comment: text }.
export async function* chat(body, signal) {
  const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch("v1/chat/completions", options);
  if (!response.ok) throw new Error(await problem(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) {
        yield { comment: part.slice(1).trim() };
        continue;
      }
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
