// Draws each figure that stands as JSON in the page, in the page's own colours, and anew when these change.
"use strict";
const DARK = matchMedia("(prefers-color-scheme: dark)");
const PLOTS = [...document.querySelectorAll(".plot")];
const PRINTED_WIDTH = 690;

function colours(printing) {
  const light = printing || !DARK.matches;
  const ink = light ? "#1c1e21" : "#e4e6e8", grid = light ? "#e3e5e8" : "#33383e", box = light ? "#ffffff" : "#202327";
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink, "font.size": 13,
    "font.family": getComputedStyle(document.body).fontFamily, "hoverlabel.font.color": ink,
    "hoverlabel.bgcolor": box, "hoverlabel.bordercolor": "#8f8a87", "xaxis.gridcolor": grid, "yaxis.gridcolor": grid,
  };
}

function draw(plot) {
  const figure = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
  return Plotly.newPlot(plot, figure.data, figure.layout, { responsive: true, displayModeBar: false })
    .then(() => Plotly.relayout(plot, colours(false)));
}

PLOTS.forEach(draw);
DARK.addEventListener("change", () => PLOTS.forEach((plot) => Plotly.relayout(plot, colours(false))));
addEventListener("beforeprint", () => PLOTS.forEach((plot) =>
  Plotly.relayout(plot, { ...colours(true), width: PRINTED_WIDTH })));
addEventListener("afterprint", () => PLOTS.forEach((plot) =>
  Plotly.relayout(plot, { ...colours(false), width: null, autosize: true })));
