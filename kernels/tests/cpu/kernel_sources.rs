// SPDX-License-Identifier: Apache-2.0

//! Checks that every CUDA kernel is followed by the macro that compares its parameters with the
//! launcher's.
//!
//! nvcc evaluates `CHECK_SIGNATURE`. This test finds kernels without that line, so it needs neither
//! nvcc nor a GPU.

use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh") {
            found.push(path);
        }
    }
}

/// Returns the name in `extern "C" __global__ void __launch_bounds__(...) name(parameters)`.
fn kernel_name(declaration: &str) -> String {
    let mut text = declaration.replace("\\\n", "").replace('\n', " ");
    if let Some(start) = text.find("__launch_bounds__") {
        let mut depth = 0;
        let end = text[start..].find(|letter| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            letter == ')' && depth == 0
        });
        text.replace_range(..start + end.unwrap() + 1, "");
    }
    let name = text.split('(').next().unwrap_or_default();
    name.split_whitespace().last().unwrap_or_default().to_owned()
}

#[test]
fn every_kernel_has_its_parameters_checked() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda"), &mut files);
    let mut kernels = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let parts: Vec<&str> = text.split("__global__ void").collect();
        for declaration in &parts[1..] {
            let name = kernel_name(declaration);
            // The check must come after this kernel and before the next one.
            assert!(
                declaration.contains(&format!("CHECK_SIGNATURE({name}, ")),
                "{}: kernel {name} lacks CHECK_SIGNATURE({name}, ...) behind its body",
                file.display()
            );
            kernels += 1;
        }
    }
    assert!(kernels >= 40, "only {kernels} kernels were found");
}
