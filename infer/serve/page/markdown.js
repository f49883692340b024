// Markdown as DOM nodes alone, so that no answer can inject anything.
//
// A line is {text, at}: `at` is the place of its first character in the answer. Containers (quotes,
// items) hand on lines without their prefixes, so that each character still knows its place, and
// marks[place] says whether it came from an accepted draft token.

const DEEPEST = 12; // containers in containers; a deeper one is drawn as text
const FENCE = /^\s*(`{3,}(?=[^`]*$)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const UNDERLINE = /^ {0,3}(={2,}|-{2,})[ \t]*$/; // of a heading
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const SIDES = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Draws what differs from the blocks drawn before; returns those drawn now.
export function render(parent, text, marks, before, decorate) {
  const blocks = parse(lines(text));
  let same = 0;
  while (same < before.length - 1 && same < blocks.length && isSame(before[same], blocks[same])) {
    blocks[same] = before[same++];
  }
  for (const block of before.slice(same)) block.node.remove();
  for (const block of blocks.slice(same)) {
    block.node = draw(block, { marks, decorate, depth: 0 });
    parent.append(block.node);
  }
  return blocks;
}

function lines(text) {
  let at = 0;
  return text.split("\n").map((line) => {
    const made = { text: line.replace(/\r$/, ""), at };
    at += line.length + 1;
    return made;
  });
}

function isSame(a, b) {
  return ["kind", "start", "end"].every((key) => a[key] === b[key]);
}

// ---- Blocks -----------------------------------------------------------------------------------

const isBlank = (line) => !line.text.trim();
const without = (line, count) => ({ text: line.text.slice(count), at: line.at + count });
const blanks = (line) => line.text.length - line.text.trimStart().length;
const columns = (line) => dedented(line, Infinity).columns;

// A line without its blanks, up to so many columns; a tab has four.
function dedented(line, most) {
  let count = 0;
  let found = 0;
  for (; found < most && /[ \t]/.test(line.text.charAt(count)); count += 1) {
    found += line.text[count] === "\t" ? 4 : 1;
  }
  return { ...without(line, count), columns: found };
}

function parse(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const read = READERS.find(([begins]) => begins(lines, at))[1];
    const block = read(lines, at);
    const last = lines[block.next - 1];
    Object.assign(block, { start: lines[at].at, end: last.at + last.text.length });
    blocks.push(block);
    at = block.next;
  }
  return blocks;
}

const starts = (pattern) => (lines, at) => pattern.test(lines[at].text);
const READERS = [
  [starts(FENCE), readCode],
  [starts(HEADING), readHeading],
  [starts(RULE), (lines, at) => ({ kind: "rule", next: at + 1 })],
  [starts(QUOTE), readQuote],
  [starts(ITEM), readList],
  [isTable, readTable],
  [() => true, readText],
];

// Whether a line ends the paragraph before it. As a wrapped line may begin with a number or a
// hyphen, a list must begin at 1 and have a text.
function interrupts(lines, at) {
  const item = ITEM.exec(lines[at].text);
  if (item) return item[0].length < lines[at].text.length && !/^(?!1[.)])\d/.test(item[2]);
  return READERS.slice(0, -1).some(([begins]) => begins(lines, at));
}

function readCode(lines, at) {
  const fence = FENCE.exec(lines[at].text)[1];
  const margin = columns(lines[at]);
  const closing = new RegExp(`^\\s*${fence[0]}{${fence.length},}\\s*$`);
  let next = at + 1;
  while (next < lines.length && !closing.test(lines[next].text)) next += 1;
  const body = lines.slice(at + 1, next).map((line) => dedented(line, margin));
  return { kind: "code", lines: body, next: Math.min(next + 1, lines.length) };
}

function readHeading(lines, at) {
  const [mark, signs] = HEADING.exec(lines[at].text);
  const line = without(lines[at], mark.length);
  line.text = line.text.replace(/(^|\s)#+\s*$/, "");
  return { kind: "heading", level: signs.length, lines: [line], next: at + 1 };
}

function readText(lines, at) {
  let next = at + 1;
  for (; next < lines.length && !isBlank(lines[next]); next += 1) {
    const underline = UNDERLINE.exec(lines[next].text);
    if (underline) {
      return { kind: "heading", level: underline[1][0] === "=" ? 1 : 2, lines: lines.slice(at, next), next: next + 1 };
    }
    if (interrupts(lines, next)) break;
  }
  return { kind: "text", lines: lines.slice(at, next), next };
}

function readQuote(lines, at) {
  const body = [];
  let next = at;
  for (; next < lines.length && !isBlank(lines[next]); next += 1) {
    const mark = QUOTE.exec(lines[next].text);
    if (!mark && interrupts(lines, next)) break;
    body.push(without(lines[next], mark ? mark[0].length : 0));
  }
  return { kind: "quote", lines: body, next };
}

// What is indented by two columns more than an item's mark belongs to the item; models write less
// than the mark's width.
function readList(lines, at) {
  const kind = (mark) => (/\d/.test(mark) ? "ol" : "ul");
  const first = ITEM.exec(lines[at].text);
  const list = { kind: kind(first[2]), number: parseInt(first[2], 10), items: [] };
  let next = at;
  let wasBlank = false;
  let within = 0; // columns of an item's own lines
  let edge = 0; // columns from which lines are the item's
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    const item = ITEM.exec(line.text);
    const body = list.items.at(-1);
    if (isBlank(line)) {
      body?.push(line);
      wasBlank = true;
      continue;
    }
    if (body && columns(line) >= edge) {
      body.push(dedented(line, within));
    } else if (item && kind(item[2]) === list.kind && !RULE.test(line.text)) {
      list.items.push([without(line, item[0].length)]);
      within = item[0].length;
      edge = columns(line) + 2;
    } else if (!wasBlank && !interrupts(lines, next)) {
      body.push(line);
    } else {
      break;
    }
    wasBlank = false;
  }
  while (isBlank(lines[next - 1])) next -= 1;
  return { ...list, next };
}

function isTable(lines, at) {
  const sides = lines[at + 1]?.text ?? "";
  if (!lines[at].text.includes("|") || !sides.includes("|") || !SIDES.test(sides)) return false;
  return cells(lines[at]).length === cells(lines[at + 1]).length;
}

function readTable(lines, at) {
  const sides = cells(lines[at + 1]).map(({ text }) => (text.endsWith(":") ? (text.startsWith(":") ? "middle" : "end") : ""));
  let next = at + 2;
  while (next < lines.length && !isBlank(lines[next]) && !interrupts(lines, next)) next += 1;
  const rows = [lines[at], ...lines.slice(at + 2, next)].map((line) => cells(line).slice(0, sides.length));
  return { kind: "table", sides, rows, next };
}

// A row's cells; a bar in `code` or after a backslash is none.
function cells(line) {
  const made = [];
  let start = 0;
  for (const bar of line.text.matchAll(/\\.|`[^`]*`|\||$/g)) {
    if (bar[0] !== "|" && bar[0] !== "") continue;
    const cell = without(line, start);
    cell.text = cell.text.slice(0, bar.index - start);
    made.push(without(cell, blanks(cell)));
    made.at(-1).text = made.at(-1).text.trimEnd();
    start = bar.index + 1;
  }
  if (!made[0].text) made.shift(); // before the first bar
  if (made.length && !made.at(-1).text) made.pop();
  return made;
}

// ---- Nodes ------------------------------------------------------------------------------------

const DRAW = {
  text: (block, how) => filled("p", block.lines, how),
  heading: (block, how) => filled(`h${Math.min(block.level + 1, 4)}`, block.lines, how),
  rule: () => element("hr"),
  quote: (block, how) => container("blockquote", block.lines, how),
  ul: drawList,
  ol: drawList,
  table: drawTable,
  code: drawCode,
};

function draw(block, how) {
  return DRAW[block.kind](block, how);
}

// dir="auto" of a container would not see the text of children that have their own.
function filled(name, lines, how) {
  const node = element(name, { dir: "auto" });
  const source = joined(lines.map((line) => without(line, blanks(line))));
  inline(node, source, 0, source.text.length, how);
  return node;
}

function container(name, lines, how) {
  if (how.depth === DEEPEST) return filled(name, lines, how);
  const inner = { ...how, depth: how.depth + 1 };
  return element(name, {}, ...parse(lines).map((block) => draw(block, inner)));
}

function drawList(block, how) {
  const list = element(block.kind, { dir: "auto" });
  if (block.kind === "ol" && block.number !== 1) list.start = block.number;
  for (const lines of block.items) {
    const item = container("li", lines, how);
    const [first] = item.children;
    if (first?.tagName === "P") first.replaceWith(...first.childNodes); // the list has its direction
    list.append(item);
  }
  return list;
}

function drawTable(block, how) {
  const [head, ...body] = block.rows.map((row) => element("tr", {}, ...block.sides.map((side, column) => {
    const cell = element(row === block.rows[0] ? "th" : "td", { className: side });
    if (row[column]) inline(cell, joined([row[column]]), 0, row[column].text.length, how);
    return cell;
  })));
  const table = element("table", { dir: "auto" }, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { className: "wide", tabIndex: 0 }, table);
}

function drawCode(block, how) {
  const code = element("code", { dir: "ltr" });
  const source = joined(block.lines);
  characters(code, source, 0, source.text.length, how);
  if (block.lines.length) code.append("\n");
  return how.decorate(element("pre", { tabIndex: 0 }, code), code);
}

// ---- Text within a block ----------------------------------------------------------------------

// Lines as one text; places[i]: where its i-th code unit stands in the answer.
function joined(lines) {
  const places = [];
  for (const { text, at } of lines) {
    for (let i = 0; i <= text.length; i++) places.push(at + i); // the line break, too
  }
  return { text: lines.map((line) => line.text).join("\n"), places };
}

// A star after a word or a bracket is no beginning: 2*3*4, x**2. Spans are bounded, as a beginning
// without an end must not make the page search all that follows.
const INLINE = new RegExp([
  /\\([*_`~#|>+\-.!])/, // 1
  /(`+)([^`]|[^`][\s\S]{0,2000}?[^`])\2(?!`)/, // 2, 3
  /(?<![\w)\]*])(\*\*)(?=[^\s*]|\*\S)([\s\S]{0,1000}?[^\s*]\*?)\*\*/, // 4, 5
  /(?<!\w)(__)(?=\S)([\s\S]{0,1000}?\S)__(?!\w)/, // 6, 7
  /(~~)(?=\S)([\s\S]{0,1000}?\S)~~/, // 8, 9
  /(?<![\w)\]*])\*(?=[^\s*])([\s\S]{0,1000}?[^\s*])\*(?![\w*])/, // 10
  /(?<!\w)_(?=[^\s_])([\s\S]{0,1000}?[^\s_])_(?!\w)/, // 11
  /!?\[([^\]\n]{1,500})\]\((https?:\/\/(?:[^()\s]|\([^()\s]*\))+)(?:[ \t]+"[^"\n]*")?\)/, // 12, 13
  /https?:\/\/[^\s<>)"'`|]*[^\s<>)"'`|.,;:!?*_]/,
].map((each) => each.source).join("|"), "g");

function inline(parent, source, start, end, how) {
  let at = start;
  for (const match of source.text.slice(start, end).matchAll(INLINE)) {
    const from = start + match.index;
    characters(parent, source, at, from, how);
    at = from + match[0].length;
    const [whole, escaped, , code, , strong, , strong2, , gone, em, em2, label, address] = match;
    const span = (name, body, lead, properties = {}) => {
      const node = element(name, properties);
      const draw = name === "code" ? characters : inline;
      const inner = name === "a" ? { ...how, isLink: true } : how;
      draw(node, source, from + lead, from + lead + body.length, inner);
      parent.append(node);
    };
    const link = { href: address ?? whole, rel: "noopener noreferrer", target: "_blank" };
    if (escaped) characters(parent, source, from + 1, at, how);
    else if (code) span("code", code, match[2].length);
    else if (strong ?? strong2) span("strong", strong ?? strong2, 2);
    else if (gone) span("del", gone, 2);
    else if (em ?? em2) span("em", em ?? em2, 1);
    else if (how.isLink) characters(parent, source, from, at, how);
    else span("a", label ?? whole, label ? whole.indexOf("[") + 1 : 0, link);
  }
  characters(parent, source, at, end, how);
}

function characters(parent, { text, places }, start, end, { marks }) {
  for (let from = start, to; from < end; from = to) {
    const mark = marks[places[from]];
    for (to = from + 1; to < end && marks[places[to]] === mark;) to += 1;
    const run = text.slice(from, to);
    parent.append(mark ? element("span", { className: "d", textContent: run }) : run);
  }
}
