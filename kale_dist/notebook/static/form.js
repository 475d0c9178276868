// The launcher form. Python sends the fields, the call and what is wrong with it; this file draws them, sends back what
// is chosen, and writes the call into a new cell, or into the clipboard where the front end has no cells that it knows.
// page.js comes before it in the same module.

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// JupyterLab and Notebook 7: below the form's own cell, which the click has made the active one, by its own toolbar.
async function writeIntoCell(from, text) {
  const notebook = from.closest(".jp-Notebook");
  const insert = notebook?.querySelector('.jp-cell-toolbar [data-command="notebook:insert-cell-below"]');
  if (!insert) return false;
  const before = new Set(notebook.querySelectorAll(".jp-Cell"));
  (insert.querySelector("button, jp-button") ?? insert).click();
  for (let tries = 0; tries < 40; tries += 1) {
    await pause(50);
    const made = [...notebook.querySelectorAll(".jp-Cell")].find((one) => !before.has(one));
    const editor = made?.querySelector(".cm-content");
    if (editor) {
      editor.focus();
      await pause(50);
      return document.execCommand("insertText", false, text);
    }
  }
  return false;
}

function render({ model, el }) {
  const id = `kd-${Math.random().toString(36).slice(2)}`;
  const inputs = new Map();
  const grid = element("div", { class: "kd-grid" });
  const problem = element("div", { class: "kd-problem", id: `${id}-problem`, role: "status" });
  const advice = element("div", { class: "kd-quiet kd-advice", role: "status" });
  const code = element("pre", { class: "kd-code", tabindex: "0", "aria-label": "The call" });
  const said = element("div", { class: "kd-said", role: "status" });
  const claims = element("span", { class: "kd-chips" });
  const claimsNote = element("span", { class: "kd-quiet", role: "status" });
  const claimsRow = element("div", { class: "kd-claims", role: "group", "aria-labelledby": `${id}-claims` },
    element("span", { id: `${id}-claims` }, "Claims of the cluster, to mount"), claims, claimsNote);
  const place = element("div", { class: "kd-place" });
  let forget;
  const announce = (text) => {
    said.textContent = text;
    clearTimeout(forget);
    forget = setTimeout(() => (said.textContent = ""), 8000);
  };
  const write = element("button", { type: "button", class: "kd-main", onclick: async () => {
    const text = model.get("code");
    if (await writeIntoCell(el, text)) return announce("Written into a new cell");
    await copy(text);
    announce("This front end takes no cells from here: the call is in the clipboard");
  } }, "Write into a new cell");
  const take = element("button", { type: "button", onclick: () => copy(model.get("code")).then(() => announce("Copied")) }, "Copy");
  const run = element("button", { type: "button", onclick: () => model.send({ ask: "run" }) }, "Run");
  const look = element("button", { type: "button", onclick: () => model.send({ ask: "look" }) }, "Refresh");
  const root = element("form", { class: "kd-form", "aria-label": "Distributed training", onsubmit: (event) => event.preventDefault() },
    element("strong", {}, "Distributed training"), grid, claimsRow, problem, advice, code,
    element("div", { class: "kd-actions" }, write, take, run, look, said), place);

  let timer;
  let unsaved = {};
  function changed(name, value) {
    unsaved[name] = value;
    const choice = { ...model.get("choice"), [name]: value };
    model.set("choice", choice);
    clearTimeout(timer);
    timer = setTimeout(() => {
      unsaved = {};
      model.save_changes();
    }, 150);
    drawVisible(choice);
  }

  function drawVisible(choice) {
    const here = (choice.on || "local") === "local";
    for (const { field, input, row } of inputs.values()) {
      row.hidden = Boolean(field.only) && !field.only.includes(choice.on || "local");
      if (field.hint_elsewhere) input.placeholder = here ? field.hint : field.hint_elsewhere;
    }
    claimsRow.hidden = choice.on !== "kubernetes";
    const taken = new Set(volumes(choice).map(([, source]) => source));
    for (const chip of claims.children) chip.setAttribute("aria-pressed", String(taken.has(chip.textContent)));
  }

  // Pairs of a path and what is mounted there.
  const volumes = (choice) => (choice.volumes ?? "").split(",").filter((part) => part.trim())
    .map((part) => [part.split("=")[0].trim(), part.split("=").slice(1).join("=").trim()]);

  // A claim that is chosen gets a path, which one may change; once more, and it is left out.
  function toggleClaim(name) {
    const before = volumes(model.get("choice"));
    const pairs = before.filter(([, source]) => source !== name);
    if (pairs.length === before.length) pairs.push([pairs.some(([path]) => path === "/data") ? `/${name}` : "/data", name]);
    const text = pairs.map(([path, source]) => `${path}=${source}`).join(", ");
    inputs.get("volumes").input.value = text;
    changed("volumes", text);
  }

  function drawClaims() {
    claims.replaceChildren(...model.get("claims").map((name) =>
      element("button", { type: "button", onclick: () => toggleClaim(name) }, name)));
    claimsNote.textContent = model.get("claims_note");
    drawVisible(model.get("choice"));
  }

  function drawFields() {
    inputs.clear();
    grid.replaceChildren();
    const choice = model.get("choice");
    for (const field of model.get("fields")) {
      const name = `${id}-${field.name}`;
      const listen = { id: name, "aria-describedby": `${id}-problem` };
      let input;
      if (field.options) {
        input = element("select", { ...listen, ...OWN_KEYS, onchange: () => changed(field.name, input.value) },
          ...field.options.map(([value, text]) => element("option", { value }, text)));
        if (!field.options.length) input.append(element("option", { value: "" }, "none found"));
      } else {
        input = element("input", { ...listen, type: "text", inputmode: field.is_number ? "numeric" : "text",
          placeholder: field.hint, autocomplete: "off", spellcheck: "false",
          oninput: () => changed(field.name, input.value), onblur: showEnds });
      }
      input.value = choice[field.name] ?? "";
      const row = element("label", { class: field.is_wide ? "kd-field kd-wide" : "kd-field", for: name }, element("span", {}, field.label), input);
      inputs.set(field.name, { field, input, row });
      grid.append(row);
    }
    drawVisible(choice);
    drawProblem();
  }

  // Of an image that is too long for its field, the tag says more than the registry.
  function showEnds() {
    for (const { input } of inputs.values()) if (document.activeElement !== input) input.scrollLeft = input.scrollWidth;
  }

  function drawChoice() {
    const choice = model.get("choice");
    // The kernel's echo of an earlier edit does not undo what was typed since.
    if (Object.entries(unsaved).some(([name, value]) => choice[name] !== value)) {
      model.set("choice", { ...choice, ...unsaved });
      return;
    }
    for (const [name, { input }] of inputs) {
      if (document.activeElement !== input) input.value = choice[name] ?? "";
    }
    drawVisible(choice);
    showEnds();
  }

  function drawProblem() {
    const { field, text } = model.get("problem");
    problem.textContent = text ?? "";
    problem.hidden = !text;
    for (const [name, { input }] of inputs) input.setAttribute("aria-invalid", String(Boolean(text) && name === field));
    for (const button of [write, take, run]) button.disabled = Boolean(text);
  }

  async function drawJob() {
    const job = model.get("job_view");
    if (!job) return;
    const child = await model.widget_manager.get_model(job);
    const view = await model.widget_manager.create_view(child);
    place.replaceChildren(view.el ?? view.node);
  }

  const watched = [
    ["change:fields", drawFields],
    ["change:choice", drawChoice],
    ["change:problem", drawProblem],
    ["change:code", () => (code.textContent = model.get("code"))],
    ["change:advice", () => (advice.textContent = model.get("advice"))],
    ["change:claims", drawClaims],
    ["change:claims_note", drawClaims],
    ["change:job_view", drawJob],
    ["msg:custom", (message) => message.said && announce(message.said)],
  ];
  watched.forEach(([event, callback]) => model.on(event, callback));
  el.append(root);
  keepInNotebook(model, () =>
    element("div", {}, element("pre", {}, model.get("code")), "Run the cell again to see the form.").outerHTML);
  const sized = new ResizeObserver(showEnds);
  sized.observe(root);
  drawFields();
  drawClaims();
  code.textContent = model.get("code");
  advice.textContent = model.get("advice");
  drawJob();
  return () => {
    sized.disconnect();
    clearTimeout(timer);
    clearTimeout(forget);
    watched.forEach(([event, callback]) => model.off(event, callback));
  };
}

export default { render };
