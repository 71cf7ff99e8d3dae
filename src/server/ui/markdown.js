// Markdown to DOM nodes. Text of the model only ever becomes text nodes and the elements made here: there is no HTML
// parser on the way that it could speak to. Links keep http, https and mailto; images become links.

const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

function link(href, children) {
  const a = document.createElement("a");
  a.href = href;
  a.target = "_blank";
  a.rel = "noopener noreferrer";
  a.append(...children);
  return a;
}

// One line's worth of inline marks. The first rule that matches at the earliest place wins; each takes its text whole,
// so the recursion ends with the marks.
const INLINE = [
  { find: /(`+)([\s\S]+?)\1(?!`)/, make: (m) => element("code", [m[2].replace(/^ ([\s\S]*\S[\s\S]*) $/, "$1")]) },
  { find: /!?\[([^\[\]\n]*)\]\(<?([^()\s<>]*(?:\([^()\s]*\)[^()\s]*)*)>?(?:\s+"[^"\n]*")?\)/,
    make: (m, depth) => SAFE_LINK.test(m[2]) ? link(m[2], inline(m[1] || m[2], depth)) : document.createTextNode(m[0]) },
  { find: /<(https?:\/\/[^\s<>]+)>/, make: (m) => link(m[1], [m[1]]) },
  { find: /\bhttps?:\/\/[^\s<>()"'`*]*[^\s<>()"'`*.,;:!?]/, make: (m) => link(m[0], [m[0]]) },
  { find: /\*\*(?=\S)([^\n]*?\S)\*\*/, make: (m, depth) => element("strong", inline(m[1], depth)) },
  { find: /~~(?=\S)([^\n]*?\S)~~/, make: (m, depth) => element("del", inline(m[1], depth)) },
  { find: /\*(?=[^\s*])([^*\n]*[^\s*])\*/, make: (m, depth) => element("em", inline(m[1], depth)) },
  { find: /(?<![\p{L}\p{N}_])_(?=[^\s_])([^_\n]*[^\s_])_(?![\p{L}\p{N}_])/u, make: (m, depth) => element("em", inline(m[1], depth)) },
  { find: /\\([\\`*_{}\[\]()#+\-.!|~<>])/, make: (m) => document.createTextNode(m[1]) },
  { find: / {2,}\n|\\\n/, make: () => document.createElement("br") },
];

function element(tag, children) {
  const e = document.createElement(tag);
  e.append(...children);
  return e;
}

function inline(text, depth = 0) {
  if (depth > 8) return [text];
  const out = [];
  // Where each rule matches next; looked for again only when what was found lies behind.
  const next = INLINE.map(() => undefined);
  let at = 0;
  while (at < text.length) {
    let best = -1;
    for (let i = 0; i < INLINE.length; ++i) {
      if (next[i] === undefined || (next[i] && next[i].index < at)) {
        const m = INLINE[i].find.exec(text.slice(at));
        if (m) m.index += at;
        next[i] = m;
      }
      if (next[i] && (best < 0 || next[i].index < next[best].index)) best = i;
    }
    if (best < 0) break;
    const m = next[best];
    if (m.index > at) out.push(text.slice(at, m.index));
    out.push(INLINE[best].make(m, depth + 1));
    at = m.index + m[0].length;
  }
  if (at < text.length) out.push(text.slice(at));
  return out;
}

// A heading without the #s that may close it; one pass, whatever the blanks.
function heading_text(s) {
  s = s.trimEnd();
  let n = s.length;
  while (n > 0 && s[n - 1] === "#") --n;
  return s.slice(0, n).trimEnd();
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((c) => c.trim().replaceAll("\\|", "|"));
}

function code_block(lines, language) {
  const code = element("code", [lines.join("\n")]);
  if (language) code.dataset.language = language;
  return element("pre", [code]);
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const indent = first[1].length, ordered = /\d/.test(first[2]);
  const out = document.createElement(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2]) !== 1) out.start = parseInt(first[2]);
  while (at < lines.length) {
    const m = ITEM.exec(lines[at]);
    if (!m || m[1].length !== indent || /\d/.test(m[2]) !== ordered) break;
    const inner = [m[3]];
    for (++at; at < lines.length; ++at) {
      const deeper = lines[at].search(/\S/);
      if (deeper < 0) {   // a blank line belongs to the item when more of it follows
        if (at + 1 >= lines.length || lines[at + 1].search(/\S/) <= indent) break;
        inner.push("");
      } else if (deeper > indent) {
        inner.push(lines[at].slice(Math.min(deeper, indent + 2)));
      } else {
        break;
      }
    }
    const content = blocks(inner, depth + 1);
    // A single paragraph needs no box of its own in the item.
    out.append(element("li", content.length && content[0].tagName === "P" ? [...content[0].childNodes, ...content.slice(1)] : content));
    if (at + 1 < lines.length && lines[at] === "" && ITEM.test(lines[at + 1])) ++at;
  }
  return { out, at };
}

function blocks(lines, depth = 0) {
  const out = [];
  if (depth > 8) return [element("p", [lines.join("\n")])];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    let m;
    if (/^\s*$/.test(line)) {
      ++at;
    } else if ((m = FENCE.exec(line))) {
      const end = new RegExp("^ {0,3}" + m[1][0] + "{" + m[1].length + ",}\\s*$");
      const code = [];
      for (++at; at < lines.length && !end.test(lines[at]); ++at) code.push(lines[at]);
      ++at;
      out.push(code_block(code, m[2]));
    } else if ((m = HEADING.exec(line))) {
      out.push(element("h" + m[1].length, inline(heading_text(m[2]))));
      ++at;
    } else if (RULE.test(line)) {
      out.push(document.createElement("hr"));
      ++at;
    } else if (QUOTE.test(line)) {
      const inner = [];
      for (; at < lines.length && QUOTE.test(lines[at]); ++at) inner.push(lines[at].replace(QUOTE, ""));
      out.push(element("blockquote", blocks(inner, depth + 1)));
    } else if (ITEM.test(line)) {
      const made = list(lines, at, depth);
      out.push(made.out);
      at = made.at;
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_LINE.test(lines[at + 1]) &&
               cells(line).length === cells(lines[at + 1]).length) {
      const table = element("table", [element("tr", cells(line).map((c) => element("th", inline(c))))]);
      for (at += 2; at < lines.length && lines[at].includes("|"); ++at)
        table.append(element("tr", cells(lines[at]).map((c) => element("td", inline(c)))));
      out.push(table);
    } else {
      const text = [];
      for (; at < lines.length && !/^\s*$/.test(lines[at]) && !(text.length && (FENCE.test(lines[at]) || HEADING.test(lines[at]) ||
             QUOTE.test(lines[at]) || ITEM.test(lines[at]) || RULE.test(lines[at]))); ++at) text.push(lines[at]);
      out.push(element("p", inline(text.join("\n"))));
    }
  }
  return out;
}

// Replaces what is in `target`.
function render_markdown(target, text) {
  target.replaceChildren(...blocks(text.replace(/\r\n?/g, "\n").split("\n")));
}
