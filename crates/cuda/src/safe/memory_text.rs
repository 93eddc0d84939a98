// SPDX-License-Identifier: Apache-2.0

//! Texts about amounts of memory, for errors.

/// Bytes as MiB with one decimal.
pub fn format_mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// The text of an out-of-memory error: what was requested, what is free, what is missing.
pub fn describe_memory_shortage(requested: u64, free: Option<u64>) -> String {
    let requested_text = format_mib(requested);
    match free {
        Some(free) if free < requested => {
            let missing = format_mib(requested - free);
            let free = format_mib(free);
            format!("the GPU has no room for {requested_text}: {free} are free, {missing} are missing")
        }
        Some(free) => format!("the GPU refuses {requested_text}, although {} are free", format_mib(free)),
        None => format!("the GPU has no room for {requested_text}"),
    }
}
