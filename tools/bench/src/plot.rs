//! Charts of a report: lines over time or over a count, and bars, as SVG without scripts for a page, and as text for a terminal.
//! Knows no measurement.

use crate::numbers::three_digits;
use crate::report::escape_html as escape;
use std::fmt::Write as _;

/// A named line or a named bar.
#[derive(Debug, Clone)]
pub struct ChartSeries {
    pub name: String,
    /// The points, by growing x; a bar has a single point.
    pub points: Vec<(f64, f64)>,
}

impl ChartSeries {
    /// A line of bytes per second over time, in GB/s.
    pub fn rates(name: String, over_time: &[(f64, f64)]) -> Self {
        ChartSeries { name, points: over_time.iter().map(|(at, rate)| (*at, rate / 1e9)).collect() }
    }
}

#[derive(Debug, Clone)]
pub struct BenchChart {
    pub title: String,
    /// The name and the unit of the horizontal axis; empty for bars.
    pub x: String,
    /// The name and the unit of the vertical axis.
    pub y: String,
    /// A value for comparison: name and y.
    pub mark: Option<(String, f64)>,
    /// The lines or bars.
    pub series: Vec<ChartSeries>,
}

const SERIES_COLOURS: [&str; 6] = ["#3b76c4", "#d9822b", "#3f9d63", "#8e5bb5", "#cf4b40", "#6b7280"];
/// Marks of lines on a terminal.
const SERIES_MARKS: [char; 6] = ['*', 'o', '+', 'x', '#', '@'];

impl BenchChart {
    /// A chart of lines, whose axes have these names and units.
    pub fn lines(title: impl Into<String>, x: &str, y: &str, series: Vec<ChartSeries>) -> Self {
        BenchChart { title: title.into(), x: x.to_owned(), y: y.to_owned(), mark: None, series }
    }

    /// A chart of bars in a unit.
    pub fn bars(title: impl Into<String>, unit: &str, bars: impl IntoIterator<Item = (String, f64)>) -> Self {
        let bars = bars.into_iter().map(|(name, value)| ChartSeries { name, points: vec![(0.0, value)] });
        BenchChart::lines(title, "", unit, bars.collect())
    }

    fn is_bars(&self) -> bool {
        self.x.is_empty()
    }

    /// Greatest x and y, and the smallest x.
    fn bounds(&self) -> (f64, f64, f64) {
        let all = || self.series.iter().flat_map(|series| &series.points);
        let high = greatest(&mut all().map(|point| point.1).chain(self.mark.iter().map(|mark| mark.1)));
        let least = all().map(|point| point.0).fold(f64::INFINITY, f64::min);
        (least.min(1e300), greatest(&mut all().map(|point| point.0)), if high > 0.0 { high * 1.05 } else { 1.0 })
    }

    /// As SVG, to be placed in a page.
    pub fn to_svg(&self) -> String {
        if self.is_bars() { self.bars_svg() } else { self.lines_svg() }
    }

    fn bars_svg(&self) -> String {
        const LABEL_WIDTH: f64 = 240.0;
        const BAR_WIDTH: f64 = 400.0;
        const LINE_HEIGHT: f64 = 22.0;
        let (_, _, high) = self.bounds();
        let mut out = self.svg_head(800.0, LINE_HEIGHT * (self.series.len() as f64 + 1.5));
        for (index, series) in self.series.iter().enumerate() {
            let value = series.points.first().map_or(0.0, |point| point.1);
            let y = LINE_HEIGHT * (index as f64 + 1.0);
            let width = value / high * BAR_WIDTH;
            out += &svg_text(12.0, y + 14.0, "start", &series.name);
            out += &svg_box(LABEL_WIDTH, y + 2.0, width, 15.0, index);
            out += &svg_text(LABEL_WIDTH + width + 8.0, y + 14.0, "start", &three_digits(value));
        }
        out + "</svg>\n"
    }

    fn lines_svg(&self) -> String {
        const LEFT_MARGIN: f64 = 64.0;
        const TOP_MARGIN: f64 = 28.0;
        const RIGHT: f64 = LEFT_MARGIN + 640.0;
        const BOTTOM: f64 = TOP_MARGIN + 220.0;
        let (least, most, high) = self.bounds();
        let span = if most > least { most - least } else { 1.0 };
        let x_of = |x: f64| LEFT_MARGIN + (x - least) / span * (RIGHT - LEFT_MARGIN);
        let y_of = |y: f64| BOTTOM - (y / high).clamp(0.0, 1.0) * (BOTTOM - TOP_MARGIN);
        let legend = 18.0 * self.series.len() as f64;
        let mut out = self.svg_head(960.0, (BOTTOM + 44.0).max(TOP_MARGIN + legend + 20.0));
        let mut rule = |y: f64, class: &str| {
            let _ = writeln!(
                out,
                "<line x1=\"{LEFT_MARGIN}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\" class=\"{class}\"/>"
            );
        };
        (0..=4).for_each(|part| rule(y_of(high * f64::from(part) / 4.0), "grid"));
        self.mark.iter().for_each(|(_, value)| rule(y_of(*value), "mark"));
        for part in 0..=4 {
            let y = high * f64::from(part) / 4.0;
            out += &svg_text(LEFT_MARGIN - 6.0, y_of(y) + 4.0, "end", &three_digits(y));
            let x = least + span * f64::from(part) / 4.0;
            out += &svg_text(x_of(x), BOTTOM + 16.0, "middle", &three_digits(x));
        }
        out += &svg_text(LEFT_MARGIN.midpoint(RIGHT), BOTTOM + 34.0, "middle", &self.x);
        if let Some((name, value)) = &self.mark {
            out += &svg_text(RIGHT + 8.0, y_of(*value) + 4.0, "start", name);
        }
        for (index, series) in self.series.iter().enumerate() {
            let colour = SERIES_COLOURS[index % SERIES_COLOURS.len()];
            let places: Vec<(f64, f64)> = series.points.iter().map(|(x, y)| (x_of(*x), y_of(*y))).collect();
            let points: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                points.join(" ")
            );
            for (x, y) in places.iter().filter(|_| places.len() <= 40) {
                let _ = write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{colour}\"/>");
            }
            let y = TOP_MARGIN + 18.0 * index as f64 + 10.0;
            out += &svg_box(RIGHT + 110.0, y - 10.0, 12.0, 12.0, index);
            out += &svg_text(RIGHT + 128.0, y, "start", &series.name);
        }
        out + "</svg>\n"
    }

    fn svg_head(&self, width: f64, height: f64) -> String {
        let title = escape(&self.title);
        format!(
            "<svg width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
             aria-label=\"{title}\">\n<text class=\"g\" x=\"0\" y=\"14\">{title} ({})</text>\n",
            escape(&self.y)
        )
    }

    /// As text, `width` columns wide at most.
    pub fn to_text(&self, width: usize) -> String {
        if self.is_bars() { self.bars_text(width) } else { self.lines_text(width) }
    }

    fn bars_text(&self, width: usize) -> String {
        let (_, _, high) = self.bounds();
        let names = self.series.iter().map(|series| series.name.chars().count()).max().unwrap_or(0);
        let room = width.saturating_sub(names + 12).max(10);
        let mut out = format!("\n  {} ({})\n", self.title, self.y);
        for series in &self.series {
            let value = series.points.first().map_or(0.0, |point| point.1);
            let bar = "█".repeat((value / high * room as f64).round() as usize);
            let _ = writeln!(out, "  {:<names$}  {bar} {}", series.name, three_digits(value));
        }
        out
    }

    fn lines_text(&self, width: usize) -> String {
        const HEIGHT: usize = 12;
        let (least, most, high) = self.bounds();
        let span = if most > least { most - least } else { 1.0 };
        let columns = width.saturating_sub(12).max(20);
        let mut grid = vec![vec![' '; columns]; HEIGHT];
        let row = |value: f64| ((1.0 - (value / high).clamp(0.0, 1.0)) * (HEIGHT - 1) as f64).round() as usize;
        if let Some((_, value)) = &self.mark {
            grid[row(*value)].fill('-');
        }
        for (index, series) in self.series.iter().enumerate() {
            let mut last: Option<(usize, f64)> = None;
            for (x, y) in &series.points {
                let here = (((*x - least) / span * (columns - 1) as f64).round() as usize).min(columns - 1);
                let (from, before) = last.unwrap_or((here, *y));
                for step in 0..=here - from {
                    let part = step as f64 / (here - from).max(1) as f64;
                    grid[row(before + (y - before) * part)][from + step] = SERIES_MARKS[index % SERIES_MARKS.len()];
                }
                last = Some((here, *y));
            }
        }
        let mut out = format!("\n  {} ({})\n", self.title, self.y);
        for (index, line) in grid.iter().enumerate() {
            let label = match index {
                0 | 6 | 11 => three_digits(high * (1.0 - index as f64 / (HEIGHT - 1) as f64)),
                _ => String::new(),
            };
            let _ = writeln!(out, "  {label:>7} |{}", line.iter().collect::<String>().trim_end());
        }
        let _ = writeln!(out, "  {:>7} +{}", "", "-".repeat(columns));
        let end = three_digits(most);
        let gap = columns.saturating_sub(end.len() + 6);
        let _ = writeln!(out, "  {:>7}  {:<6}{:^gap$}{end}", "", three_digits(least), self.x);
        let mut legend: Vec<String> = self
            .series
            .iter()
            .enumerate()
            .map(|(i, s)| format!("{} {}", SERIES_MARKS[i % SERIES_MARKS.len()], s.name))
            .collect();
        legend.extend(self.mark.iter().map(|(name, _)| format!("- {name}")));
        let _ = writeln!(out, "  {:>7}  {}", "", legend.join("   "));
        out
    }
}

fn greatest(values: &mut dyn Iterator<Item = f64>) -> f64 {
    values.fold(0.0_f64, f64::max)
}

fn svg_text(x: f64, y: f64, anchor: &str, text: &str) -> String {
    let text = escape(text);
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>\n")
}

/// A box in the colour of a series.
fn svg_box(x: f64, y: f64, width: f64, height: f64, series: usize) -> String {
    let colour = SERIES_COLOURS[series % SERIES_COLOURS.len()];
    format!("<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{colour}\"/>\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> BenchChart {
        let series = |name: &str, by: f64| ChartSeries {
            name: name.into(),
            points: (0..10).map(|i| (f64::from(i), f64::from(i) * by)).collect(),
        };
        BenchChart {
            title: "Throughput <over> time".into(),
            x: "seconds".into(),
            y: "GB/s".into(),
            mark: Some(("needed".into(), 5.0)),
            series: vec![series("tcp", 1.0), series("rdma", 2.0)],
        }
    }

    fn bars() -> BenchChart {
        let series = |name: &str, value: f64| ChartSeries { name: name.into(), points: vec![(0.0, value)] };
        let series = vec![series("mount", 0.25), series("node", 0.5)];
        BenchChart { title: "CPU".into(), x: String::new(), y: "s/GiB".into(), mark: None, series }
    }

    #[test]
    fn pictures_escape_their_words_and_follow_the_scheme_of_colours() {
        let text = lines().to_svg() + &bars().to_svg();
        assert!(
            text.contains("&lt;over&gt;") && text.contains("class=\"mark\"") && !text.contains("stroke=\"#222"),
            "{text}"
        );
        assert_eq!((text.matches("<polyline").count(), text.matches("<rect").count()), (2, 4));
        assert_eq!((text.matches("<svg").count(), text.matches("</svg>").count()), (2, 2));
    }

    #[test]
    fn a_terminal_shows_lines_and_bars() {
        let text = lines().to_text(80);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("* tcp   o rdma   - needed") && text.contains("seconds"), "{text}");
        assert!(text.contains("o\n") || text.contains('o'), "{text}");
        // The line of the greater values ends in the first row, that of the smaller ones in the middle.
        let rows: Vec<&str> = text.lines().filter(|line| line.contains('|')).collect();
        assert!(rows[1].contains('o') || rows[0].contains('o'), "{text}");
        assert!(rows[5].contains('*') || rows[6].contains('*'), "{text}");
        let text = bars().to_text(60);
        let long = |name: &str| text.lines().find(|l| l.contains(name)).unwrap().matches('█').count();
        assert!(long("node") >= 2 * long("mount") - 1 && text.contains("0.500"), "{text}");
    }

    #[test]
    fn nothing_measured_is_no_panic() {
        let empty = BenchChart { series: vec![ChartSeries { name: "x".into(), points: vec![] }], ..lines() };
        assert!(!empty.to_text(10).is_empty() && !empty.to_svg().contains("NaN"));
        let flat = ChartSeries { name: "one".into(), points: vec![(3.0, 0.0)] };
        let flat = BenchChart { mark: None, series: vec![flat], ..lines() };
        assert!(!flat.to_svg().contains("NaN") && !flat.to_text(40).contains("NaN"));
    }
}
