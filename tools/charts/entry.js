// The part of ECharts that a report page uses. `npm install && npm run build` in this folder writes
// ../../syncheck/report/echarts.js; README.md tells why this library was chosen.
import { init, use } from "echarts/core";
import { BarChart, CustomChart, HeatmapChart, LineChart } from "echarts/charts";
import { AriaComponent, DataZoomComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent, VisualMapContinuousComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([
  AriaComponent, BarChart, CanvasRenderer, CustomChart, DataZoomComponent, GridComponent, HeatmapChart, LegendComponent,
  LineChart, MarkLineComponent, TooltipComponent, VisualMapContinuousComponent,
]);
export { init };
