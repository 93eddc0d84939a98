// SPDX-License-Identifier: Apache-2.0

//! The doctor's host checks: memfd seals, descriptor limits, memory, huge pages, and copy speed.

use std::hint::black_box;
use std::time::Instant;

use kernels::cpu::Isa;
use memory::host::{HostAllocation, WINDOW_BYTES};
use service::meminfo;

use super::finding::{CheckResult, Finding, Verdict, format_rate};
use super::{hand_off, test_model};
use crate::gpu_support;

const HOST: &str = "host";

/// A model has up to a few thousand tensors, and without packing each has a descriptor.
const COMFORTABLE_FDS: u64 = 4096;

/// Several times the size of any core's caches.
const COPY_BYTES: usize = 256 << 20;
const COPY_ROUNDS: u32 = 4;

pub(super) fn examine() -> Vec<Finding> {
    let tried = |check, outcome: fn() -> CheckResult<Finding>| Finding::from_result(HOST, check, outcome());
    vec![
        tried("kernel", kernel),
        tried("processor", processor),
        tried("memory", memory),
        tried("descriptors", descriptors),
        tried("locked memory", locked_memory),
        tried("memfd seals", seals),
        tried("huge pages", huge_pages),
        tried("hand-off", hand_over),
        tried("copy", copy),
    ]
}

fn ok(check: &'static str, text: impl Into<String>) -> Finding {
    Finding::new(HOST, check, Verdict::Ok, text)
}

fn note(check: &'static str, text: impl Into<String>) -> Finding {
    Finding::new(HOST, check, Verdict::Note, text)
}

fn kernel() -> CheckResult<Finding> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let release = release.trim();
    Ok(ok("kernel", format!("Linux {release} on {}", std::env::consts::ARCH)).with("release", release))
}

fn processor() -> CheckResult<Finding> {
    let (isa, threads) = (Isa::best().name(), std::thread::available_parallelism()?.get());
    let finding = match isa {
        "portable" => note(
            "processor",
            format!("{threads} threads; the kernels use no vector instructions of this processor"),
        ),
        isa => ok("processor", format!("{threads} threads, kernels use {isa}")),
    };
    Ok(finding.with("threads", threads).with("isa", isa))
}

fn memory() -> CheckResult<Finding> {
    let (host, available) = (meminfo::host_memory()?, meminfo::available_bytes()?);
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let limit = match meminfo::tightest_cgroup_limit() {
        Some(cgroup) => format!(", {:.1} GiB allowed by the cgroup", gib(cgroup.limit_bytes)),
        None => String::new(),
    };
    let text = format!("{:.1} GiB, {:.1} available{limit}", gib(host.total_bytes), gib(available));
    Ok(ok("memory", text).with("total_bytes", host.total_bytes).with("available_bytes", available))
}

fn descriptors() -> CheckResult<Finding> {
    // Only the hard limit counts: the supervisor raises the soft limit to it.
    let hard = hard_limit("Max open files")?;
    let finding = match hard {
        Some(hard) if hard < COMFORTABLE_FDS => note(
            "descriptors",
            format!(
                "{hard} may be open (RLIMIT_NOFILE); models with many allocations need {COMFORTABLE_FDS}; raise it with ulimit -Hn"
            ),
        ),
        Some(hard) => ok("descriptors", format!("{hard} may be open")),
        None => ok("descriptors", "any number may be open"),
    };
    Ok(finding.with("hard_limit", hard))
}

fn locked_memory() -> CheckResult<Finding> {
    let hard = hard_limit("Max locked memory")?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let (limit, pinned) = (hard.unwrap_or(u64::MAX), gpu_support::pinned_bytes_per_load());
    let may = match hard {
        Some(bytes) => format!("{:.1} MiB may be locked (RLIMIT_MEMLOCK)", mib(bytes)),
        None => "any amount may be locked".to_owned(),
    };
    let finding = match pinned {
        0 => ok("locked memory", format!("{may}; the host backend locks none")),
        _ if limit < pinned => note(
            "locked memory",
            format!(
                "{may}; a load onto a GPU pins {:.1} MiB, which may count against the limit; raise it with ulimit -l or LimitMEMLOCK= in a unit",
                mib(pinned)
            ),
        ),
        _ => ok("locked memory", format!("{may}; a load onto a GPU pins {:.1} MiB", mib(pinned))),
    };
    Ok(finding.with("hard_limit_bytes", hard).with("pinned_by_loads_bytes", pinned))
}

/// Reads a hard limit of this process; `None` if it is unlimited.
fn hard_limit(name: &str) -> CheckResult<Option<u64>> {
    let limits = std::fs::read_to_string("/proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name));
    let hard = line
        .and_then(|rest| rest.split_whitespace().nth(1))
        .ok_or("/proc/self/limits has an unknown format")?;
    Ok(if hard == "unlimited" { None } else { Some(hard.parse()?) })
}

fn seals() -> CheckResult<Finding> {
    let mut allocation = HostAllocation::create("ballast-doctor", WINDOW_BYTES)?;
    let (slice, backing) = allocation.parts();
    backing.ensure(0, WINDOW_BYTES)?;
    slice.fill(1);
    // `seal` also verifies the seals. Kernels before 6.7 refuse to map a sealed memfd as shared.
    let sealed = allocation.seal()?;
    let mapped = sealed.map("doctor's model", WINDOW_BYTES)?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let start = format!("{:x}-", mapped.as_ptr() as usize);
    let shared = maps.lines().any(|line| line.starts_with(&start) && line.contains(" r--s "));
    Ok(if shared {
        ok("memfd seals", "memory is sealed against writing and mapped shared")
    } else {
        note(
            "memfd seals",
            "memory is sealed against writing; this kernel (before 6.7) maps it privately, at no cost",
        )
    }
    .with("shared", shared))
}

fn huge_pages() -> CheckResult<Finding> {
    let mut allocation = HostAllocation::create("ballast-doctor", WINDOW_BYTES)?;
    let (slice, backing) = allocation.parts();
    backing.ensure(0, WINDOW_BYTES)?;
    slice.fill(1);
    let start = slice.as_ptr() as usize;
    let huge_bytes = huge_bytes_at(&std::fs::read_to_string("/proc/self/smaps")?, start).unwrap_or(0);
    let setting =
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let setting = chosen(&setting).unwrap_or("absent").to_owned();
    // MFD_HUGETLB takes its pages from this pool. It may be empty, so weights do not rely on it.
    let pool = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    let pool: Option<u64> = pool.ok().and_then(|text| text.trim().parse().ok());
    let finding = if huge_bytes == WINDOW_BYTES {
        ok("huge pages", "weights are stored in huge pages")
    } else {
        note(
            "huge pages",
            format!(
                "{huge_bytes} of {WINDOW_BYTES} bytes became huge pages (transparent_hugepage/shmem_enabled is {setting}): weights are read more slowly"
            ),
        )
    };
    Ok(finding.with("huge_bytes", huge_bytes).with("shmem_enabled", setting).with("hugetlb_pool_pages", pool))
}

/// Finds the bytes in huge pages of the mapping that starts at an address, in the text of smaps.
fn huge_bytes_at(smaps: &str, start: usize) -> Option<u64> {
    let start = format!("{start:x}-");
    let fields = smaps.lines().skip_while(|line| !line.starts_with(&start)).skip(1);
    let mut own = fields.take_while(|line| line.split(' ').next().is_some_and(|word| word.ends_with(':')));
    let line = own.find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// Returns the word in brackets, which is the selected value of a sysfs setting.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

fn hand_over() -> CheckResult<Finding> {
    let hand_off = hand_off::over_host()?;
    let text = format!(
        "{} MiB of a killed process stay readable and are not writable; mapped in {:.2} ms",
        test_model::total_bytes() >> 20,
        hand_off.import.as_secs_f64() * 1e3
    );
    Ok(ok("hand-off", text)
        .with("bytes", test_model::total_bytes())
        .with("loading_seconds", hand_off.loading.as_secs_f64())
        .with("import_seconds", hand_off.import.as_secs_f64()))
}

fn copy() -> CheckResult<Finding> {
    let source = vec![1u8; COPY_BYTES];
    let mut target = vec![0u8; COPY_BYTES];
    target.copy_from_slice(&source);
    let started = Instant::now();
    for _ in 0..COPY_ROUNDS {
        black_box(&mut target).copy_from_slice(black_box(&source));
    }
    let bytes_per_second = COPY_BYTES as f64 * f64::from(COPY_ROUNDS) / started.elapsed().as_secs_f64();
    let text = format!("one thread copies {}", format_rate(bytes_per_second));
    Ok(ok("copy", text).with("bytes_per_second", bytes_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_bytes_are_those_of_the_mapping_asked_for() {
        let smaps = "7f00-7f01 rw-s 00 00:01 1 /memfd:a (deleted)\nSize: 8192 kB\nShmemPmdMapped:     2048 kB\nVmFlags: rd\n\
                     7f02-7f03 rw-s 00 00:01 2 /memfd:b (deleted)\nSize: 8192 kB\nShmemPmdMapped:     8192 kB\n\
                     7f04-7f05 rw-p 00 00:00 0\nSize: 4 kB\n";
        assert_eq!(huge_bytes_at(smaps, 0x7f00), Some(2 << 20));
        assert_eq!(huge_bytes_at(smaps, 0x7f02), Some(8 << 20));
        assert_eq!(huge_bytes_at(smaps, 0x7f04), None);
        assert_eq!(huge_bytes_at(smaps, 0x7f06), None);
        assert_eq!(chosen("always within_size advise [never] deny force\n"), Some("never"));
    }
}
