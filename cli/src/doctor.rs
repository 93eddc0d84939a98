// SPDX-License-Identifier: Apache-2.0

//! `ballast doctor`: checks by experiment whether this machine can run a fleet.
//!
//! Each finding has a verdict. "ok": works. "note": works, but is slower or has a limitation.
//! "failed": a fleet does not run. The command fails if a check fails. A machine without a GPU is
//! not a failure.

pub(crate) mod finding;
pub(crate) mod hand_off;
mod host;
mod peer;
pub(crate) mod test_model;

use serde_json::json;
use service::Exit;

use crate::cli_error::{CliError, CliResult};
use crate::gpu_support;
use crate::terminal::print_stdout;
use finding::{Finding, Verdict};

pub(crate) use peer::{PeerArguments, run_peer};

#[derive(clap::Args)]
pub(crate) struct DoctorArguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: DoctorArguments) -> CliResult {
    let mut findings = host::examine();
    findings.extend(gpu_support::doctor_findings());
    let failed = findings.iter().filter(|finding| finding.verdict == Verdict::Failed).count();
    let text = if arguments.json { json_report(&findings) } else { text_report(&findings) };
    print_stdout(&text)?;
    match failed {
        0 => Ok(()),
        count => Err(CliError::new(
            Exit::Internal,
            format!("{count} of {} checks failed on this machine", findings.len()),
        )),
    }
}

fn json_report(findings: &[Finding]) -> String {
    let ok = findings.iter().all(|finding| finding.verdict != Verdict::Failed);
    format!("{:#}\n", json!({"version": env!("CARGO_PKG_VERSION"), "ok": ok, "findings": findings}))
}

/// Formats one finding per line, grouped by the part of the machine.
fn text_report(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
    let mut report = String::new();
    let mut part = "";
    for finding in findings {
        if finding.part != part {
            part = &finding.part;
            report += &format!("{part}\n");
        }
        let verdict = match finding.verdict {
            Verdict::Ok => "ok",
            Verdict::Note => "note",
            Verdict::Failed => "FAILED",
        };
        report += &format!("  {verdict:<6}  {:<width$}  {}\n", finding.check, finding.text);
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn reports_say_the_same_in_both_forms() {
        let error: Box<dyn std::error::Error> = std::io::Error::other("no luck").into();
        let findings = [
            Finding::new("host", "copy", Verdict::Ok, "12.0 GB/s").with("bytes_per_second", 12e9),
            Finding::from_result("cuda:0", "hand-off", Err(error)),
        ];
        assert_eq!(
            text_report(&findings),
            "host\n  ok      copy      12.0 GB/s\ncuda:0\n  FAILED  hand-off  no luck\n"
        );
        let report: Value = serde_json::from_str(&json_report(&findings)).unwrap();
        assert_eq!(report["ok"], false);
        assert_eq!(report["findings"][0]["values"]["bytes_per_second"], 12e9);
        assert_eq!(report["findings"][1]["verdict"], "failed");
    }
}
