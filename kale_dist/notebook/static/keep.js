
// What stays of a job's view when there is no kernel.

const KEPT = "The last picture of a job of kale_dist"; // tells our saved widgets from others
const ENDED = ["succeeded", "failed", "cancelled"];
const STATE_TYPE = "application/vnd.jupyter.widget-state+json";
const VIEW_TYPE = "application/vnd.jupyter.widget-view+json";

// The picture that stays when there is no kernel to ask.
function lastPicture(model) {
  if (ENDED.includes(model.get("state"))) return model.get("picture");
  const call = element("code", {}, `kd.attach("${model.get("ref")}")`);
  const note = element("div", { style: "margin:4px 2px 8px;font-size:12px" }, "As it was when its kernel ended. ", call, " shows the job again.");
  return model.get("picture") + note.outerHTML;
}

const keepers = new WeakMap(); // widget manager -> jobs of its notebook

// Have the last picture saved with the notebook, so that it opens without a kernel: as a widget of plain HTML in the
// place of this one, by the format in which front ends save widgets. Where there is no such document, nothing happens.
function keepInNotebook(model) {
  const manager = model.widget_manager;
  const context = manager?.context;
  if (!context?.saveState?.connect || !context.model?.setMetadata) return;
  if (keepers.has(manager)) {
    keepers.get(manager).set(model.get("identity"), model);
    return;
  }
  const jobs = new Map([[model.get("identity"), model]]);
  keepers.set(manager, jobs);
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
    for (const [id, job] of jobs) {
      if (!shown.has(id)) continue;
      kept.push([id, {
        model_name: "HTMLModel", model_module: "@jupyter-widgets/controls", model_module_version: "2.0.0",
        state: { value: lastPicture(job), tooltip: KEPT },
      }]);
    }
    context.model.setMetadata("widgets", {
      ...context.model.getMetadata("widgets"),
      [STATE_TYPE]: { version_major: 2, version_minor: 0, state: Object.fromEntries(kept) },
    });
  });
}
