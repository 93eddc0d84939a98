// SPDX-License-Identifier: Apache-2.0

//! Compiles the .proto files with protox, so that building needs no protoc.

use std::path::PathBuf;

const FILES: [&str; 5] = [
    "ballast/v1/ballast.proto",
    "ballast/worker/v1/worker.proto",
    "ballast/weights/v1/weights.proto",
    "ballast/weights/v1/loader.proto",
    "ballast/fleet/v1/fleet.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), protox::prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
