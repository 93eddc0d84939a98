// SPDX-License-Identifier: Apache-2.0

//! `ballast bench compare` and `ballast bench report`: what to make of results of `bench serve`.

use std::fs;
use std::path::{Path, PathBuf};

use loadgen::serving::{Comparison, ComparisonVerdict, StoredResult, compare, report_page};
use service::Exit;
use service::exit::one_line;
use service::printable::printable_lines;

use crate::cli_error::{CliError, CliResult, IoContext};
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(super) struct ResultComparisonArguments {
    /// A result, or a directory with the results of several runs (*.json)
    #[arg(value_name = "A.json|DIR")]
    a: PathBuf,
    /// What is compared with A
    #[arg(value_name = "B.json|DIR")]
    b: PathBuf,
    /// Confidence of each interval
    #[arg(long, value_name = "SHARE", default_value_t = 0.95)]
    confidence: f64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub(super) struct ResultPageArguments {
    /// Results, of `bench serve` or of vLLM's benchmark
    #[arg(value_name = "RESULT.json", required = true)]
    results: Vec<PathBuf>,
    /// Page to write
    #[arg(long, value_name = "FILE.html")]
    html: PathBuf,
}

pub(super) fn compare_results(arguments: &ResultComparisonArguments) -> CliResult {
    if !(0.5..1.0).contains(&arguments.confidence) {
        return Err(CliError::new(Exit::Usage, "--confidence is from 0.5 up to, and not including, 1"));
    }
    let (a, b) = (read_side(&arguments.a)?, read_side(&arguments.b)?);
    let comparison = compare(&a, &b, arguments.confidence).map_err(|error| {
        let text = format!("cannot compare {} with {}", arguments.a.display(), arguments.b.display());
        CliError::new(Exit::Usage, format!("{text}: {error}"))
    })?;
    match arguments.json {
        true => print_stdout(&format!("{}\n", serde_json::json!(comparison))),
        false => print_stdout(&printable_lines(&table(&comparison))),
    }
}

pub(super) fn report(arguments: &ResultPageArguments) -> CliResult {
    let named = |path: &PathBuf| {
        let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok((name, read_result(path)?))
    };
    let results = arguments.results.iter().map(named).collect::<CliResult<Vec<_>>>()?;
    let page = report_page(&results).map_err(|error| CliError::new(Exit::Internal, one_line(&error)))?;
    fs::write(&arguments.html, page).with_context(|| format!("cannot write {}", arguments.html.display()))
}

/// The results of one side, in the order of their file names.
fn read_side(path: &Path) -> CliResult<Vec<StoredResult>> {
    if !path.is_dir() {
        return Ok(vec![read_result(path)?]);
    }
    let context = || format!("cannot read {}", path.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(path).with_context(context)? {
        let file = entry.with_context(context)?.path();
        files.extend(file.extension().is_some_and(|extension| extension == "json").then_some(file));
    }
    files.sort();
    if files.is_empty() {
        let text =
            format!("{} has no file *.json: write results there with `bench serve --json`", path.display());
        return Err(CliError::new(Exit::Usage, text));
    }
    files.iter().map(|file| read_result(file)).collect()
}

fn read_result(path: &Path) -> CliResult<StoredResult> {
    let json = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    StoredResult::parse(&json).map_err(|error| {
        CliError::new(Exit::Usage, format!("{} is no result: {}", path.display(), one_line(&error)))
    })
}

fn table(comparison: &Comparison) -> String {
    let [a, b] = comparison.runs;
    let percent = comparison.confidence * 100.0;
    let mut text = format!(
        "{:<24} {:>12} {:>12} {:>7}   {percent:.0}% interval\n",
        format!("runs: {a} and {b}"),
        "A",
        "B",
        "B/A"
    );
    for row in &comparison.rows {
        let verdict = match row.verdict {
            ComparisonVerdict::NoDifferenceShown => "no difference shown",
            // One run does not show how runs differ.
            ComparisonVerdict::BIsBetter if a.min(b) == 1 => "B is better in this run",
            ComparisonVerdict::BIsWorse if a.min(b) == 1 => "B is worse in this run",
            ComparisonVerdict::BIsBetter => "B is better",
            ComparisonVerdict::BIsWorse => "B is worse",
        };
        text += &format!(
            "{:<24} {:>12.3} {:>12.3} {:>7.3}   {:.3} to {:.3}: {verdict}\n",
            row.name, row.a, row.b, row.ratio, row.ratio_low, row.ratio_high
        );
    }
    text += "Each interval stands by itself: of many figures, some differ by chance.\n";
    comparison.warnings.iter().for_each(|warning| text += &format!("warning: {warning}\n"));
    text
}
