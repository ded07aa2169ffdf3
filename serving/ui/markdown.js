// Markdown as elements. Text of a model becomes text nodes only: no HTML is ever parsed, images
// are not loaded, and links go to http, https and mailto alone.

const element = (name, ...children) => {
  const made = document.createElement(name);
  made.append(...children);
  return made;
};

// What may stand inside a line, the first that fits wins. All repeats are bounded, so that no text
// takes more than linear time.
const INLINE = new RegExp([
  "(?<ticks>`{1,3})(?<code>[^`](?:.{0,500}?[^`])?)\\k<ticks>(?!`)",
  "\\*\\*(?<strong>\\S(?:.{0,500}?\\S)?)\\*\\*",
  "\\*(?<emphasis>[^\\s*](?:[^*]{0,500}?[^\\s*])?)\\*",
  "~~(?<gone>\\S(?:.{0,500}?\\S)?)~~",
  "\\[(?<words>[^\\[\\]]{1,500})\\]\\((?<target>(?:https?://|mailto:)[^\\s()<>]{1,2000})\\)",
].join("|"), "gs");
const DEEPEST = 4; // emphasis inside emphasis

function inline(text, depth = 0) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, strong, emphasis, gone, words, target } = match.groups;
    found.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const inner = (part) => (depth < DEEPEST ? inline(part, depth + 1) : [part]);
    if (code !== undefined) found.push(element("code", code.trim() || code));
    else if (strong !== undefined) found.push(element("strong", ...inner(strong)));
    else if (emphasis !== undefined) found.push(element("em", ...inner(emphasis)));
    else if (gone !== undefined) found.push(element("s", ...inner(gone)));
    else {
      const link = element("a", ...inner(words));
      link.href = target;
      link.rel = "noopener noreferrer nofollow";
      link.target = "_blank";
      found.push(link);
    }
  }
  return [...found, text.slice(end)].filter((part) => part !== "");
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6}) (.*)$/;
const BULLET = /^( *)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const CELLS = /^\s*\|.*\|\s*$/;
const BETWEEN_CELLS = /^\s*\|(?:\s*:?-+:?\s*\|)+\s*$/;

const startsBlock = (line) => [FENCE, HEADING, BULLET, RULE, CELLS, /^\s*$/, /^ {0,3}>/].some((each) => each.test(line));

function fence(lines) {
  const [, mark, language] = FENCE.exec(lines.shift());
  const body = [];
  while (lines.length && !lines[0].trim().startsWith(mark)) body.push(lines.shift());
  lines.shift();
  const code = element("code", body.join("\n"));
  const made = element("pre", code);
  if (language) made.dataset.language = language;
  made.tabIndex = 0; // to be scrolled by keys
  return made;
}

// A list; deeper ones inside it have more spaces before them.
function list(lines, depth = 0) {
  const [, first, number] = BULLET.exec(lines[0]);
  const made = element(number === undefined ? "ul" : "ol");
  if (number !== undefined) made.start = Number(number);
  while (lines.length) {
    const match = BULLET.exec(lines[0]);
    if (match && match[1].length < first.length) break;
    if (match && match[1].length > first.length + 1 && depth < DEEPEST && made.lastChild) {
      made.lastChild.append(list(lines, depth + 1));
    } else if (match && (match[2] === undefined) === (number === undefined)) {
      made.append(element("li", ...inline(match[3])));
      lines.shift();
    } else if (!match && /^ {2,}\S/.test(lines[0]) && made.lastChild) {
      made.lastChild.append(" ", ...inline(lines.shift().trim()));
    } else break;
  }
  return made;
}

function table(lines) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((each) => each.trim());
  const made = element("table");
  const row = (name) => element("tr", ...cells(lines.shift()).map((each) => element(name, ...inline(each))));
  if (BETWEEN_CELLS.test(lines[1] ?? "")) {
    made.append(element("thead", row("th")));
    lines.shift();
  }
  const body = element("tbody");
  while (lines.length && CELLS.test(lines[0])) body.append(row("td"));
  made.append(body);
  return made;
}

function block(lines, depth) {
  const line = lines[0];
  const heading = HEADING.exec(line);
  if (FENCE.test(line)) return fence(lines);
  if (RULE.test(line)) return lines.shift() && element("hr");
  if (heading) return lines.shift() && element(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2].trim()));
  if (BULLET.test(line)) return list(lines);
  if (CELLS.test(line)) return table(lines);
  if (/^ {0,3}>/.test(line) && depth < DEEPEST) {
    const quoted = [];
    while (lines.length && /^ {0,3}>/.test(lines[0])) quoted.push(lines.shift().replace(/^ {0,3}> ?/, ""));
    return element("blockquote", ...blocks(quoted, depth + 1));
  }
  const text = [lines.shift()];
  while (lines.length && !startsBlock(lines[0])) text.push(lines.shift());
  return element("p", ...inline(text.join("\n")));
}

function blocks(lines, depth) {
  const found = [];
  while (lines.length) {
    if (lines[0].trim()) found.push(block(lines, depth));
    else lines.shift();
  }
  return found;
}

// The elements of a text.
export const markdown = (text) => blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
