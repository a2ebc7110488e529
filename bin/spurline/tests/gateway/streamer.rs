//! The model streamer of Run:ai, which vLLM and SGLang load models with, reads safetensors files through an endpoint and through a mount.

use crate::rig::*;
use spurline_rig::python_packages::installed_packages;
use spurline_rig::s3_clients::*;
use spurline_rig::world::*;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The streamer, of this release, and torch without code for GPUs, which comes from an index of its own.
const STREAMER_PACKAGES: [&str; 5] = [
    "torch==2.15.0+cpu",
    "numpy==2.4.6",
    "safetensors==0.8.0",
    "runai-model-streamer==0.17.0",
    "runai-model-streamer-s3==0.17.0",
];

const KEY: &str = "client";
const SECRET: &str = "0123456789abcdef0123";

/// Runs a command of the script beside this file.
fn run_script(command: &mut Command, words: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gateway/streamer.py");
    succeed(command.arg(script).args(words));
}

/// Each tensor is compared with its file; `SPURLINE_TEST_TORCH=1` runs the test, and `PIP_EXTRA_INDEX_URL` names torch's index.
#[test]
fn a_streamer_reads_models_into_torch() {
    if std::env::var_os("SPURLINE_TEST_TORCH").is_none() {
        return;
    }
    let Some(bin) = installed_packages("s3-streamer", &STREAMER_PACKAGES) else { return };
    let python = bin.join("python");
    let world = World::new();
    let data = world.dir("data");
    let model = data.join("models/one");
    fs::create_dir_all(&model).unwrap();
    let model = model.to_str().unwrap();
    run_script(&mut Command::new(&python), &["make", model]);

    let keys = key_file(&world, &format!("{KEY}:{SECRET}\n"));
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &["--s3-keys", keys.to_str().unwrap()]);
    // With the name of a host in the URL, the streamer would make the bucket a part of that name.
    let endpoint = at.url().replace("127.0.0.1", "localhost");
    let mut streamer = s3_client(&python, &endpoint, ClientKeys { id: KEY, secret: SECRET });
    streamer.env("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0");
    run_script(&mut streamer, &["read", model, "s3://data/models/one"]);
    let counted = stats(&world.path("run"), at.address.as_ref());
    assert!(count(&counted, "s3", "read_bytes") > 60 * MIB as u64, "the bytes come from the endpoint: {counted}");
    // The mount has the same cache folder.
    at.kill();
    if !can_mount() {
        return;
    }
    let mount = world.mount(data.to_str().unwrap(), &[]);
    for strategy in ["io_uring_direct", "libaio_direct", "sync_buffered"] {
        let mut streamer = Command::new(&python);
        streamer.env("RUNAI_STREAMER_FS_STRATEGY", strategy);
        run_script(&mut streamer, &["read", model, mount.path("models/one").to_str().unwrap()]);
    }
}
