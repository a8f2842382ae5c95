// Plotly can dim bars that are not selected, but not those that are not under the pointer.
const DIMMED = "0.2";
const PATIENCE = 10_000; // milliseconds until the chart's code is fetched and it is drawn

const workOf = (trace, index) => trace.customdata?.[index]?.split("<br>")[0];

// Calls back with every bar's element and the name of its work. Plotly binds to a bar its number, and to a trace's group its bars.
function eachBar(chart, visit) {
  for (const group of chart.querySelectorAll(".cartesianlayer .barlayer .trace")) {
    const { trace } = group.__data__[0];
    for (const point of group.querySelectorAll(".point")) visit(point, workOf(trace, point.__data__.i));
  }
}

function dimOthers(chart) {
  let lit = null;
  const light = (work) => {
    if (work === lit) return;
    lit = work;
    eachBar(chart, (bar, of) => { bar.style.opacity = work === null || of === work ? "" : DIMMED; });
  };
  chart.on("plotly_hover", ({ points: [point] }) => light(workOf(point.data, point.pointNumber) ?? null));
  chart.on("plotly_unhover", () => light(null));
}

export default function ({ data, parentElement }) {
  const key = `.st-key-${CSS.escape(data.chart)}`;
  const begun = performance.now();
  let timer = 0;
  const look = () => {
    const chart = document.querySelector(`${key} .js-plotly-plot`);
    if (chart?.on && !chart.dimsOthers) {
      chart.dimsOthers = true;
      dimOthers(chart);
    } else if (!chart?.on && performance.now() - begun < PATIENCE) {
      timer = setTimeout(look, 100);
    }
  };
  look();
  return () => clearTimeout(timer);
}
