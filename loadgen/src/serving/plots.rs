// SPDX-License-Identifier: Apache-2.0

//! Plots of results as SVG.

use plotters::prelude::*;

/// Pixels; a page scales them.
const SIZE: (u32, u32) = (480, 270);
/// Colours that people with colour blindness tell apart (Okabe and Ito 2008).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];
const GREY: RGBColor = RGBColor(128, 128, 128);
/// Points of one curve, so that a page with a million requests stays small.
const POINTS_MAX: usize = 1000;

/// A drawing failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw a plot: {0}")]
pub struct PlotError(String);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marks {
    Line,
    Points,
}

pub(crate) struct Plot {
    pub(crate) x_name: &'static str,
    pub(crate) y_name: &'static str,
    pub(crate) marks: Marks,
    /// Values above this are left out.
    pub(crate) x_max: f64,
    pub(crate) y_max: f64,
    /// One curve for each result, which has the colour of its number.
    pub(crate) curves: Vec<Vec<(f64, f64)>>,
}

/// `rgb(r, g, b)` of a result.
pub(crate) fn colour_text(result: usize) -> String {
    let RGBColor(r, g, b) = colour(result);
    format!("rgb({r}, {g}, {b})")
}

fn colour(result: usize) -> RGBColor {
    COLOURS[result % COLOURS.len()]
}

/// At most [`POINTS_MAX`] entries, evenly chosen, with the last one.
pub(crate) fn thinned<T: Copy>(points: &[T]) -> Vec<T> {
    let step = points.len().div_ceil(POINTS_MAX).max(1);
    let mut kept: Vec<T> = points.iter().step_by(step).copied().collect();
    if !points.is_empty() && !(points.len() - 1).is_multiple_of(step) {
        kept.extend(points.last());
    }
    kept
}

/// The share of a sorted sample that is at most each value.
pub(crate) fn cumulative(sorted: &[f64]) -> Vec<(f64, f64)> {
    let share = |at: usize| (at + 1) as f64 / sorted.len() as f64;
    let points: Vec<(f64, f64)> = sorted.iter().enumerate().map(|(at, value)| (*value, share(at))).collect();
    thinned(&points)
}

pub(crate) fn draw(plot: &Plot) -> Result<String, PlotError> {
    let failed = |error: &dyn std::fmt::Display| PlotError(error.to_string());
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        // A range without extent cannot be drawn.
        let (x_max, y_max) = (plot.x_max.max(1e-9), plot.y_max.max(1e-9));
        let mut chart = ChartBuilder::on(&area)
            .margin(8)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..x_max, 0.0..y_max)
            .map_err(|error| failed(&error))?;
        chart
            .configure_mesh()
            .disable_mesh()
            .axis_style(GREY)
            .label_style(("sans-serif", 13).into_font().color(&GREY))
            .x_labels(6)
            .y_labels(6)
            .x_desc(plot.x_name)
            .y_desc(plot.y_name)
            .draw()
            .map_err(|error| failed(&error))?;
        for (result, curve) in plot.curves.iter().enumerate() {
            let colour = colour(result);
            let shown = curve.iter().copied().filter(|(x, _)| *x <= x_max);
            match plot.marks {
                Marks::Line => chart.draw_series(LineSeries::new(shown, colour.stroke_width(2))).map(|_| ()),
                Marks::Points => chart
                    .draw_series(shown.map(|point| Circle::new(point, 2, colour.mix(0.6).filled())))
                    .map(|_| ()),
            }
            .map_err(|error| failed(&error))?;
        }
        area.present().map_err(|error| failed(&error))?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_a_curve_in_its_colour_and_its_axes_names() {
        let curves = vec![vec![(0.0, 0.0), (5.0, 1.0)], vec![(1.0, 0.5), (50.0, 1.0)]];
        let plot =
            Plot { x_name: "seconds", y_name: "share", marks: Marks::Line, x_max: 10.0, y_max: 1.0, curves };
        let svg = draw(&plot).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(svg.contains("seconds") && svg.contains("share") && svg.contains("#0072B2"), "{svg}");
        let points = Plot { marks: Marks::Points, ..plot };
        assert_eq!(draw(&points).unwrap().matches("<circle").count(), 3, "one is above the limit");
    }

    #[test]
    fn an_empty_plot_can_be_drawn() {
        let plot = Plot {
            x_name: "x",
            y_name: "y",
            marks: Marks::Line,
            x_max: 0.0,
            y_max: 0.0,
            curves: vec![Vec::new()],
        };
        assert!(draw(&plot).is_ok());
    }

    #[test]
    fn long_curves_are_thinned_and_keep_their_end() {
        let long: Vec<usize> = (0..123_457).collect();
        let kept = thinned(&long);
        assert!(kept.len() <= POINTS_MAX + 1 && kept.last() == Some(&123_456) && kept[0] == 0);
        assert!(kept.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(thinned(&[1, 2, 3]), [1, 2, 3]);
        assert_eq!(cumulative(&[1.0, 4.0]), [(1.0, 0.5), (4.0, 1.0)]);
    }
}
