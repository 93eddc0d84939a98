// SPDX-License-Identifier: Apache-2.0

//! Draws a [`TopView`].

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Row, Table};
use service::ByteSize;
use service::printable::printable;

use super::rates::WorkerTokenRates;
use super::view::{DeviceLine, ModelLine, ProcessLine, TopView, WorkerFigures};

const WEIGHTS: Color = Color::Blue;
const WORKERS: Color = Color::Green;
const OTHER: Color = Color::Yellow;
const FAULT: Color = Color::Red;
/// Cells of the bar of a device.
const BAR_CELLS: usize = 40;
/// Models beyond these are counted in one line, so that the processes stay visible.
const MODELS_SHOWN: usize = 12;

/// `skipped` processes are scrolled out. `trouble` says why the figures are old.
pub(crate) fn draw(frame: &mut Frame<'_>, view: &TopView, skipped: usize, trouble: Option<&str>) {
    let models = view.models.len().min(MODELS_SHOWN) + usize::from(view.models.len() > MODELS_SHOWN);
    let height = |lines: usize| Constraint::Length(u16::try_from(lines).unwrap_or(u16::MAX));
    let areas: [Rect; 5] = Layout::vertical([
        height(2),
        height(view.devices.len() + 1),
        height(models + 2),
        Constraint::Min(3),
        height(1),
    ])
    .areas(frame.area());
    frame.render_widget(header(view, trouble), areas[0]);
    frame.render_widget(Paragraph::new(view.devices.iter().map(device).collect::<Vec<_>>()), areas[1]);
    frame.render_widget(model_table(view), areas[2]);
    frame.render_widget(process_table(view, skipped), areas[3]);
    frame.render_widget(Line::from("q quits, arrows scroll").dim(), areas[4]);
}

/// The last process that may be the first one shown.
pub(crate) fn skipped_max(view: &TopView) -> usize {
    view.processes.len().saturating_sub(1)
}

fn header(view: &TopView, trouble: Option<&str>) -> Paragraph<'static> {
    let WorkerTokenRates { output, prompt } = view.total;
    let first = Line::from(vec![
        Span::from("ballast ").bold(),
        Span::from(format!(
            "{} | {output:.0} tokens/s, {prompt:.0} prompt tokens/s | {} running, {} waiting",
            text(if view.http_address.is_empty() { &view.runtime_dir } else { &view.http_address }),
            view.running,
            view.waiting
        )),
    ]);
    let second = trouble.map_or_else(Line::default, |why| Line::from(text(why)).fg(FAULT));
    Paragraph::new(vec![first, second])
}

/// Names may come from files and clients: control characters are escaped.
fn text(text: &str) -> String {
    printable(text)
}

fn device(device: &DeviceLine) -> Line<'static> {
    let DeviceLine { name, capacity, weights, workers, other, health, is_faulty } = device;
    let cells = |bytes: u64| {
        let part = bytes as f64 / (*capacity).max(1) as f64;
        // What is there is seen.
        ((part * BAR_CELLS as f64).round() as usize).clamp(usize::from(bytes > 0), BAR_CELLS)
    };
    let bar = |bytes: u64, colour: Color| Span::from("█".repeat(cells(bytes))).fg(colour);
    let used: usize = [weights, workers, other].iter().map(|bytes| cells(**bytes)).sum();
    let rounded = |bytes: &u64| ByteSize(*bytes).rounded();
    let reserved = weights + workers + other;
    let last = Span::from(if health.is_empty() { String::new() } else { format!("  {}", text(health)) });
    Line::from(vec![
        Span::from(format!("{:<12.12} ", text(name))),
        bar(*weights, WEIGHTS),
        bar(*workers, WORKERS),
        bar(*other, OTHER),
        Span::from("·".repeat(BAR_CELLS.saturating_sub(used))).dim(),
        Span::from(format!(" {} of {}: ", rounded(&reserved), rounded(capacity))),
        Span::from(format!("weights {}", rounded(weights))).fg(WEIGHTS),
        Span::from(", "),
        Span::from(format!("workers {}", rounded(workers))).fg(WORKERS),
        if *is_faulty { last.fg(FAULT) } else { last },
    ])
}

fn title(cells: &[&'static str]) -> Row<'static> {
    Row::new(cells.to_vec()).style(Style::new().bold().reversed())
}

fn marked(row: Row<'static>, is_faulty: bool) -> Row<'static> {
    if is_faulty { row.style(Style::new().fg(FAULT)) } else { row }
}

fn model_table(view: &TopView) -> Table<'static> {
    let row = |model: &ModelLine| {
        let cells = [
            text(&model.name),
            format!("{}/{}", model.workers.0, model.workers.1),
            model.running.to_string(),
            model.waiting.to_string(),
            format!("{:.0}", model.rates.output),
            format!("{:.0}", model.rates.prompt),
            text(&model.copies),
            text(&model.state),
        ];
        marked(Row::new(cells), model.is_faulty)
    };
    let left_out = view.models.len().saturating_sub(MODELS_SHOWN);
    let more = (left_out > 0).then(|| Row::new([format!("and {left_out} more")]).dim());
    let rows = view.models.iter().take(MODELS_SHOWN).map(row).chain(more);
    let widths = [
        Constraint::Min(16),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Min(16),
        Constraint::Min(10),
    ];
    Table::new(rows, widths)
        .header(title(&["MODEL", "WORKERS", "RUNNING", "WAITING", "TOKENS/S", "PROMPT/S", "COPIES", "STATE"]))
}

fn process_table(view: &TopView, skipped: usize) -> Table<'static> {
    let row = |process: &ProcessLine| {
        let figure = |of: fn(&WorkerFigures) -> String| process.worker.as_ref().map_or_else(String::new, of);
        let cells = [
            text(&process.name),
            process.state.to_owned(),
            if process.pid == 0 { "-".to_owned() } else { process.pid.to_string() },
            process.restarts.to_string(),
            process.uptime.clone(),
            figure(|worker| worker.running.to_string()),
            figure(|worker| worker.waiting.to_string()),
            figure(|worker| format!("{:.0}", worker.rates.output)),
            figure(|worker| format!("{:.0}", worker.rates.prompt)),
            figure(|worker| format!("{:.0}% of {}", worker.kv_used * 100.0, worker.kv_tokens)),
            text(&process.model),
            text(&process.device),
        ];
        marked(Row::new(cells), process.is_faulty)
    };
    let widths = [
        Constraint::Length(13),
        Constraint::Length(11),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(7),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(14),
        Constraint::Min(12),
        Constraint::Min(9),
    ];
    Table::new(view.processes.iter().skip(skipped).map(row), widths).header(title(&[
        "PROCESS", "STATE", "PID", "RESTARTS", "UPTIME", "RUNNING", "WAITING", "TOKENS/S", "PROMPT/S",
        "KV CACHE", "MODEL", "DEVICE",
    ]))
}
