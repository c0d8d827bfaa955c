"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const said = document.getElementById("said");
  const charts = [...document.querySelectorAll("[data-chart]")];
  const chosen = new Map(charts.map((chart) => [chart.dataset.chart, 0]));
  const config = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };

  const say = (text) => { said.textContent = ""; requestAnimationFrame(() => { said.textContent = text; }); };

  // Colours are roles: "@blue" under a key that ends in "color", or in a colorscale, is the style's --blue.
  const painted = (value, key, style) => {
    if (typeof value === "string") {
      return value.startsWith("@") && /color(scale)?$/.test(key) ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((inner) => painted(inner, key, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, painted(inner, name, style)]));
  };

  const draw = (chart) => {
    const name = chart.dataset.chart, view = data[name][chosen.get(name)], style = getComputedStyle(root);
    const note = document.getElementById(name + "-note");
    if (note) note.textContent = view.note;
    chart.setAttribute("aria-label", view.alt);
    return Plotly.react(chart, painted(view.data, "", style), painted(view.layout, "", style), config);
  };
  const drawAll = () => Promise.all(charts.map(draw)).then(() => { root.dataset.drawn = "yes"; });

  for (const picker of document.querySelectorAll("select[data-for]")) {
    picker.addEventListener("change", () => {
      chosen.set(picker.dataset.for, Number(picker.value));
      draw(document.getElementById(picker.dataset.for + "-chart"));
    });
  }

  // The arrow keys walk through a chart's points as a pointer would, and each is said.
  const points = (chart) => chart.data.flatMap((trace, curve) => {
    if (trace.hoverinfo === "skip") return [];
    if (trace.type !== "heatmap") return trace.hovertext.map((text, k) => ({ text, at: [{ curveNumber: curve, pointNumber: k }] }));
    return trace.hovertext.flatMap((row, y) => row.map((text, x) => ({ text, at: { xval: x, yval: y } })));
  });
  const plain = (text) => text.replace(/<br>/g, ", ").replace(/<\/?b>/g, "").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  for (const chart of charts) {
    let at = -1;
    chart.addEventListener("keydown", (event) => {
      const all = points(chart), row = chart.data[0].type === "heatmap" ? chart.data[0].x.length : 1;
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row }[event.key];
      if (event.key === "Escape") { at = -1; Plotly.Fx.unhover(chart); return; }
      if (event.key === "Home" || event.key === "End") at = event.key === "Home" ? 0 : all.length - 1;
      else if (step === undefined) return;
      else if (at < 0) at = 0;
      else if (at + step >= 0 && at + step < all.length) at += step;
      event.preventDefault();
      Plotly.Fx.hover(chart, all[at].at);
      say(plain(all[at].text));
    });
    chart.addEventListener("blur", () => { if (at >= 0) { at = -1; Plotly.Fx.unhover(chart); } });
  }

  const cell = (element) => (element.dataset.value ?? element.textContent).replace(/\s+/g, " ").trim();
  const copied = (element) => element.tagName === "TABLE"
    ? [...element.rows].map((row) => [...row.cells].map(cell).join("\t")).join("\n") + "\n"
    : element.textContent;
  const copyOldWay = (text) => {
    const area = Object.assign(document.createElement("textarea"), { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  for (const button of document.querySelectorAll("[data-copy]")) {
    const words = button.textContent;
    button.addEventListener("click", async () => {
      const text = copied(document.getElementById(button.dataset.copy));
      let done = true;
      try { await navigator.clipboard.writeText(text); } catch { done = copyOldWay(text); button.focus(); }
      button.textContent = done ? "Copied" : "Not copied";
      say(done ? "Copied" : "The browser did not allow copying");
      setTimeout(() => { button.textContent = words; }, 1600);
    });
  }

  const toggle = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const show = () => { toggle.setAttribute("aria-pressed", String(isDark())); return drawAll(); };
  toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; show(); });
  system.addEventListener("change", show);
  show();
})();
