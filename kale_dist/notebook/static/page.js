// Elements, clipboard, downloads.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// JupyterLab takes arrows and letters for its own wherever no text is typed; an element with this keeps them.
const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not served over TLS have no clipboard.
    const area = element("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function save(name, parts) {
  const link = element("a", { href: URL.createObjectURL(new Blob(parts, { type: "text/plain" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Make `old` like `fresh` with as few changes as there are: what is focused, selected or scrolled stays so.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name, value } of [...fresh.attributes]) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) {
    // What was folded open stays so.
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  before.slice(after.length).forEach((node) => node.remove());
  after.forEach((node, index) => (index < before.length ? morph(before[index], node) : old.append(node)));
}
