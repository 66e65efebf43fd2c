"use strict";
const $ = (id) => document.getElementById(id);

// What a model writes is put into the page as text nodes, never as HTML.
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// `code`, **bold**, *italic*, ***both***, [links](of the web); everything else is text.
const INLINE = [
  /`(?<code>[^`\n]+)`/, /\*\*(?<bold>\*[^*\n]+\*|[^*\n]+)\*\*/, /(?<![\w*])\*(?<italic>[^*\s][^*\n]*)\*(?![\w*])/,
  /\[(?<words>[^[\]\n]+)\]\((?<url>https?:\/\/[^\s()<>"]+)\)/,
];
const PATTERN = new RegExp(INLINE.map((each) => each.source).join("|"), "g");

function link(words, url) {
  const made = element("a", "", words);
  Object.assign(made, { href: url, target: "_blank", rel: "noopener noreferrer" });
  return made;
}

// The nodes of a text without line structure.
function inline(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(PATTERN)) {
    const { code, bold, italic, words, url } = found.groups;
    nodes.push(document.createTextNode(text.slice(end, found.index)));
    const made = words !== undefined ? link(words, url) : element(code !== undefined ? "code" : bold !== undefined ? "strong" : "em");
    if (words === undefined) made.append(...(bold !== undefined ? inline(bold) : [code ?? italic]));
    nodes.push(made);
    end = found.index + found[0].length;
  }
  nodes.push(document.createTextNode(text.slice(end)));
  return nodes.filter((node) => node.textContent);
}

// A button that copies a text, which is shown in a node.
function copyButton(text, node) {
  const copy = element("button", "", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text());
    else { // pages from http addresses of other machines have no clipboard
      getSelection().selectAllChildren(node);
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  return copy;
}

function codeBlock(language, text) {
  const box = element("div", "code"), head = element("div", "", language || "code"), pre = element("pre");
  head.append(copyButton(() => text, pre));
  pre.append(element("code", "", text));
  box.append(head, pre);
  return box;
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines) {
  const made = element("table"), numeric = cells(lines[1]).map((rule) => /^-+:$/.test(rule));
  lines.forEach((line, n) => {
    if (n === 1) return; // the rule below the heading
    const row = element("tr");
    for (const [column, cell] of cells(line).entries()) {
      const place = element(n ? "td" : "th", numeric[column] ? "number" : "");
      place.append(...inline(cell));
      row.append(place);
    }
    made.append(row);
  });
  return made;
}

// Items by their indentation; a deeper one becomes a list inside the item above it.
function list(lines) {
  const depth = (line) => line.match(/^\s*/)[0].length, outer = depth(lines[0]);
  const ordered = lines[0].match(/^\s*(\d+)[.)]/), made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = Number(ordered[1]);
  for (let n = 0; n < lines.length;) {
    const item = element("li"), inside = [];
    let text = lines[n++].replace(/^\s*([-*+]|\d+[.)])\s+/, "");
    while (n < lines.length && !isItem(lines[n])) text += " " + lines[n++].trim();
    item.append(...inline(text));
    while (n < lines.length && depth(lines[n]) > outer) inside.push(lines[n++]);
    if (inside.length) item.append(list(inside));
    made.append(item);
  }
  return made;
}

const isItem = (line) => /^\s*([-*+]|\d+[.)])\s+\S/.test(line) && !isLine(line);
const isLine = (line) => /^\s*([-*_])(\s*\1){2,}\s*$/.test(line);
const FENCE = /^(\s*)(`{3,}|~{3,})\s*([\w+#.-]*)/;
const isRule = (line) => line !== undefined && line.includes("|") && /^[\s|:-]+$/.test(line) && line.includes("-");

// The nodes of a text in Markdown: headings, lists, tables, quotations, code, lines, paragraphs.
function markdown(text) {
  const lines = text.split("\n"), nodes = [];
  let paragraph = [];
  const flush = () => {
    if (!paragraph.length) return;
    const made = element("p");
    made.append(...inline(paragraph.join("\n")));
    nodes.push(made);
    paragraph = [];
  };
  const take = (n, wanted) => { let end = n; while (end < lines.length && wanted(lines[end])) end++; return lines.slice(n, end); };
  for (let n = 0; n < lines.length; n++) {
    const line = lines[n], fence = line.match(FENCE), heading = line.match(/^(#{1,6})\s+(.*)/);
    if (fence) {
      flush();
      const inside = take(n + 1, (each) => !each.trim().startsWith(fence[2]));
      const indent = new RegExp(`^\\s{0,${fence[1].length}}`);
      nodes.push(codeBlock(fence[3], inside.map((each) => each.replace(indent, "")).join("\n")));
      n += inside.length + 1;
    } else if (heading) {
      flush();
      const made = element("h" + Math.min(6, heading[1].length + 2));
      made.append(...inline(heading[2]));
      nodes.push(made);
    } else if (isLine(line)) {
      flush();
      nodes.push(element("hr"));
    } else if (isItem(line)) {
      flush();
      const items = take(n, (each) => isItem(each) || (/^\s+\S/.test(each) && !FENCE.test(each)));
      nodes.push(list(items));
      n += items.length - 1;
    } else if (line.includes("|") && isRule(lines[n + 1])) {
      flush();
      const rows = take(n, (each) => each.includes("|"));
      nodes.push(table(rows));
      n += rows.length - 1;
    } else if (line.startsWith("> ")) {
      flush();
      const quoted = take(n, (each) => each.startsWith(">"));
      const made = element("blockquote");
      made.append(...inline(quoted.map((each) => each.replace(/^>\s?/, "")).join("\n")));
      nodes.push(made);
      n += quoted.length - 1;
    } else if (line.trim()) paragraph.push(line);
    else flush();
  }
  flush();
  return nodes;
}
