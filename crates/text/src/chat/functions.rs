// SPDX-License-Identifier: Apache-2.0

//! The functions that Hugging Face provides to templates: `raise_exception` and `strftime_now`.

use std::error::Error as _;
use std::fmt;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};

/// Most bytes of a format for `strftime_now`.
const MAX_DATE_BYTES: usize = 256;

/// Widest indentation, to bound the output of a hostile template.
const MAX_INDENT: usize = 64;

/// The message of a template's `raise_exception`: the conversation does not fit the model, which
/// only the client can repair.
#[derive(Debug)]
struct RaisedException(String);

impl fmt::Display for RaisedException {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RaisedException {}

/// Jinja2's test: strings, lists, objects and undefined values are iterable. In minijinja, null is
/// too.
pub(crate) fn is_iterable(value: &Value) -> bool {
    value.is_undefined() || (!value.is_none() && value.try_iter().is_ok()) || value.as_str().is_some()
}

/// Jinja2's `indent(width=4, first=false, blank=false)`. In minijinja, a final line break is lost.
pub(crate) fn indent(text: &str, width: Option<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let width = match width {
        Some(width) => Some(width),
        None => kwargs.get("width")?,
    };
    let indentation = match width {
        None => " ".repeat(4),
        Some(width) => match (width.as_str(), width.as_usize()) {
            (Some(text), _) if text.len() <= MAX_INDENT => text.to_owned(),
            (None, Some(blanks)) if blanks <= MAX_INDENT => " ".repeat(blanks),
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "indent is too wide")),
        },
    };
    let first: Option<bool> = kwargs.get("first")?;
    let blank: Option<bool> = kwargs.get("blank")?;
    kwargs.assert_all_used()?;
    let mut out = String::with_capacity(text.len());
    for (index, line) in text.split('\n').enumerate() {
        let is_first = index == 0;
        out.push_str(if is_first { "" } else { "\n" });
        let is_indented =
            if is_first { first == Some(true) } else { !line.is_empty() || blank == Some(true) };
        out.push_str(if is_indented { &indentation } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

pub(crate) fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(RaisedException(message)))
}

/// Returns the message if `raise_exception` made rendering fail.
pub(crate) fn raised(error: &Error) -> Option<&str> {
    let mut source = error.source();
    while let Some(current) = source {
        if let Some(RaisedException(message)) = current.downcast_ref() {
            return Some(message);
        }
        source = current.source();
    }
    None
}

/// `strftime_now(format)` for a given time in UTC, so that the prompt does not depend on a router's
/// time zone.
pub(crate) fn strftime_at(unix_seconds: i64, format: &str) -> Result<String, Error> {
    let failed =
        |source: jiff::Error| Error::new(ErrorKind::InvalidOperation, "strftime_now").with_source(source);
    let now = jiff::Timestamp::from_second(unix_seconds).map_err(failed)?.to_zoned(jiff::tz::TimeZone::UTC);
    if format.len() > MAX_DATE_BYTES {
        return Err(Error::new(ErrorKind::InvalidOperation, "strftime_now: the format is too long"));
    }
    jiff::fmt::strtime::format(format, &now).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indentation_keeps_the_final_line_break() {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("indent", indent);
        let render = |filter: &str| {
            environment
                .render_str(&format!("{{{{ 'a\\n\\nb\\n' | {filter} }}}}"), minijinja::context! {})
                .unwrap()
        };
        // Expected texts are those of Jinja2 3.1.6.
        assert_eq!(render("indent"), "a\n\n    b\n");
        assert_eq!(render("indent(2, first=true)"), "  a\n\n  b\n");
        assert_eq!(render("indent(width='>', blank=true)"), "a\n>\n>b\n>");
    }

    #[test]
    fn dates_are_those_of_python() {
        // 2024-07-03 04:05:09 UTC, a Wednesday; datetime.strftime gives the same.
        let at = |format| strftime_at(1_719_979_509, format).unwrap();
        assert_eq!(at("%d %b %Y"), "03 Jul 2024");
        assert_eq!(at("%A, %B %-d, %Y %H:%M:%S %p %j"), "Wednesday, July 3, 2024 04:05:09 AM 185");
        assert!(strftime_at(0, "%").is_err());
        assert!(strftime_at(i64::MAX, "%Y").is_err());
    }
}
