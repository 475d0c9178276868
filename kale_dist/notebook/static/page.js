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

// JupyterLab uses arrows and letters as shortcuts outside of text fields; an element with this attribute keeps them.
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

// Make `old` equal to `fresh` with few changes, so that focus, selection and scroll positions stay.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name, value } of [...fresh.attributes]) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) {
    // Opened details stay open.
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  before.slice(after.length).forEach((node) => node.remove());
  after.forEach((node, index) => (index < before.length ? morph(before[index], node) : old.append(node)));
}

// -- what is saved with the notebook, for when there is no kernel ----------------------------------------------------

const KEPT = "The last picture of a widget of kale_dist"; // marks our saved widgets
const STATE_TYPE = "application/vnd.jupyter.widget-state+json";
const VIEW_TYPE = "application/vnd.jupyter.widget-view+json";

const keepers = new WeakMap(); // widget manager -> pictures of the widgets in its notebook

// Have the last picture (a function gives its HTML) saved with the notebook, so that it opens without a kernel: as a
// widget of plain HTML in the place of this one, by the format in which front ends save widgets. Where there is no such
// document, nothing happens.
function keepInNotebook(model, picture) {
  const manager = model.widget_manager;
  const context = manager?.context;
  if (!context?.saveState?.connect || !context.model?.setMetadata) return;
  if (keepers.has(manager)) {
    keepers.get(manager).set(model.get("identity"), picture);
    return;
  }
  const pictures = new Map([[model.get("identity"), picture]]);
  keepers.set(manager, pictures);
  context.saveState.connect((_, stage) => {
    if (stage !== "started") return;
    const shown = new Set();
    for (const cell of context.model.cells) {
      for (let index = 0; index < (cell.outputs?.length ?? 0); index += 1) {
        shown.add(cell.outputs.get(index).data[VIEW_TYPE]?.model_id);
      }
    }
    const before = context.model.getMetadata("widgets")?.[STATE_TYPE]?.state ?? {};
    const kept = Object.entries(before).filter(([id, one]) => shown.has(id) || one.state?.tooltip !== KEPT);
    for (const [id, draw] of pictures) {
      if (!shown.has(id)) continue;
      kept.push([id, {
        model_name: "HTMLModel", model_module: "@jupyter-widgets/controls", model_module_version: "2.0.0",
        state: { value: draw(), tooltip: KEPT },
      }]);
    }
    context.model.setMetadata("widgets", {
      ...context.model.getMetadata("widgets"),
      [STATE_TYPE]: { version_major: 2, version_minor: 0, state: Object.fromEntries(kept) },
    });
  });
}
