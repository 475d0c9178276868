
// The live view of one job. Python sends parts of the picture as HTML of its own making, and log lines as they come;
// these files put them into the page, and send back what is clicked. Everything that came from a job is escaped: parts
// in Python, log lines in log.js by textContent. page.js, log.js, keep.js and job.js are one module, in this order.

const ANSWER_MS = 2000; // a kernel that runs a cell may answer late, or never before the cell ends
const SAID_MS = 6000;
const MAX_WAIT_MS = 60000;
const PARTS = ["head", "progress", "error", "curves", "ranks", "notes"];
const AFTER = {
  cancel: "The job is cancelled then.",
  retry: "The job is submitted again then.",
  plan: "It is copied then.",
  download: "The log comes then.",
};

// All views of each job: a front end may take one away and put another one in its place, which then is the same.
const views = new Map();

// One view. It outlives the front end's: `attach` puts it into the page, again where it was taken away.
class JobView {
  constructor() {
    this.id = crypto.randomUUID?.() ?? String(Math.random());
    this.open = {};
    this.timers = {};
    this.visible = null;
    this.onScreen = true;
    this.focused = null;
    this.said = element("div", { class: "kd-said", role: "status" });
    this.log = new LogView((what) => this.ask(what), (text) => this.announce(text));
    this.places = Object.fromEntries(PARTS.map((part) => [part, element("div", { class: `kd-${part}` })]));
    this.cancel = this.button("Cancel", () => this.confirm(true), "kd-danger");
    this.no = this.button("No", () => this.confirm(false));
    const yes = this.button("Yes, cancel the job", () => { this.confirm(false); this.ask("cancel"); }, "kd-danger");
    this.sure = element("span", { class: "kd-sure", role: "group", "aria-label": "Cancel the job?", hidden: true }, yes, this.no);
    this.sure.addEventListener("keydown", (event) => event.key === "Escape" && this.confirm(false));
    this.retry = this.button("Retry", () => this.ask("retry"));
    this.plan = this.button("", () => this.ask("plan"));
    const actions = element("div", { class: "kd-actions" }, this.cancel, this.sure, this.retry, this.plan, this.said);
    const { head, ...others } = this.places;
    this.root = element("div", { class: "kd-job", role: "group" }, head, actions, ...Object.values(others), this.log.node);
    this.root.addEventListener("focusin", (event) => (this.focused = event.target));
    this.root.addEventListener("focusout", () => setTimeout(() => this.root.isConnected && !this.root.contains(document.activeElement) && (this.focused = null)));
    this.observer = new IntersectionObserver((entries) => {
      this.onScreen = entries[entries.length - 1].isIntersecting;
      // What was drawn while it was out of the page could not be scrolled.
      if (this.onScreen) this.log.shownAgain();
      this.see();
    });
    this.see = this.see.bind(this);
    this.watched = [
      ...PARTS.map((part) => [`change:${part}`, () => this.drawPart(part)]),
      ["change:state", () => this.drawActions()],
      ["change:name", () => this.drawActions()],
      ["change:world_size", () => this.log.setRanks(this.model.get("world_size"))],
      ["change:job_number", () => { this.log.clear(); this.tellHere(); }],
      ["comm_live_update", () => this.checkKernel()],
      ["msg:custom", (message, buffers) => this.receive(message, buffers)],
    ];
  }

  button(text, onclick, kind = "") {
    return element("button", { type: "button", class: kind, onclick }, text);
  }

  attach(model, el) {
    this.detach();
    this.model = model;
    this.el = el;
    el.append(this.root);
    PARTS.forEach((part) => this.drawPart(part));
    this.drawActions();
    this.log.setRanks(model.get("world_size"));
    if (this.focused && document.activeElement === document.body) this.focused.focus({ preventScroll: true });
    this.watched.forEach(([event, callback]) => model.on(event, callback));
    this.observer.observe(this.root);
    document.addEventListener("visibilitychange", this.see);
    this.see();
    keepInNotebook(model);
    model.widget_manager?.get_model?.(model.get("identity")).then((found) => {
      this.found = found;
      this.checkKernel();
    }, () => {});
  }

  detach() {
    if (!this.model) return;
    this.watched.forEach(([event, callback]) => this.model.off(event, callback));
    this.observer.disconnect();
    document.removeEventListener("visibilitychange", this.see);
    Object.values(this.timers).forEach(clearTimeout);
    this.tell({ tell: "gone", view: this.id });
    this.model = this.visible = null;
  }

  // Without its kernel this is a picture.
  checkKernel() {
    if (!this.model || !this.found || this.found.comm_live) return;
    const { model, el } = this;
    this.detach();
    this.root.remove();
    el.innerHTML = lastPicture(model);
  }

  // A kernel that has ended takes nothing more.
  tell(message) {
    try {
      this.model.send(message);
    } catch (error) {
      console.debug("kale_dist", error);
    }
  }

  later(name, wait_ms, callback) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(callback, wait_ms);
  }

  // A page that nobody sees is sent nothing; what it missed is sent when it is seen again. Said until it is answered:
  // what a page says before its kernel has a subshell for it waits for the cell that runs.
  see() {
    const now = this.onScreen && document.visibilityState === "visible";
    if (now !== this.visible) {
      this.visible = now;
      this.tellHere();
    }
  }

  tellHere(wait_ms = 1000) {
    this.later("here", wait_ms, () => this.tellHere(Math.min(2 * wait_ms, MAX_WAIT_MS)));
    const next = this.log.complete ? this.log.next : 0;
    this.tell({ tell: "here", view: this.id, next, visible: this.visible });
  }

  ask(what) {
    this.tell({ ask: what, view: this.id });
    this.later("answer", ANSWER_MS, () => this.announce(`The kernel is busy: stop the cell first (■ in the toolbar). ${AFTER[what]}`, true));
  }

  announce(text, stays = false) {
    this.said.textContent = text;
    clearTimeout(this.timers.said);
    if (!stays) this.later("said", SAID_MS, () => (this.said.textContent = ""));
  }

  receive(message, buffers) {
    if (message.lines) this.log.add(message.first, message.lines);
    if (message.view !== this.id) return;
    if (message.heard) {
      clearTimeout(this.timers.here);
      if (message.heard === "visible") this.log.complete = true;
      return;
    }
    clearTimeout(this.timers.answer);
    if (message.say) this.announce(message.say);
    if (message.plan) copy(message.plan).then(() => this.announce("Copied"));
    if (message.file) save(message.file, buffers);
  }

  confirm(open) {
    this.sure.hidden = !open;
    this.cancel.hidden = open;
    (open ? this.no : this.cancel).focus();
  }

  drawPart(part) {
    const place = this.places[part];
    const fresh = place.cloneNode(false);
    fresh.innerHTML = this.model.get(part);
    fresh.hidden = !this.model.get(part);
    morph(place, fresh);
    for (const fold of place.querySelectorAll("details")) {
      fold.open = this.open[part] ?? fold.open;
      fold.ontoggle = () => (this.open[part] = fold.open);
    }
  }

  drawActions() {
    const state = this.model.get("state");
    const ended = ENDED.includes(state);
    const focused = this.sure.contains(document.activeElement) || document.activeElement === this.cancel;
    if (ended) this.sure.hidden = true;
    this.cancel.hidden = ended || !this.sure.hidden;
    this.retry.hidden = !ended;
    this.log.setEnded(ended);
    if (ended && focused) this.retry.focus();
    this.plan.textContent = this.model.get("plan_word");
    this.root.setAttribute("aria-label", `Job ${this.model.get("name")}, ${state}`);
    this.root.dataset.state = state;
  }
}

function render({ model, el }) {
  const identity = model.get("identity");
  if (!views.has(identity)) views.set(identity, []);
  let view = views.get(identity).find((one) => !one.root.isConnected);
  if (!view) {
    view = new JobView();
    views.get(identity).push(view);
  }
  view.attach(model, el);
  return () => view.model === model && view.detach();
}

export default { render };
