//! The CSI driver with real mounts: volumes over their life, ends of all processes, bad input. Mount processes run on
//! this host; what pods would do, directories and processes do here.

mod ends;

use spurline_csi::pb;
use spurline_rig::driver::{DriverRig, capability, capability_of, pair};
use spurline_rig::program::wait_for;
use spurline_rig::staging_group::StagingGroup;
use spurline_rig::world::World;
use spurline_testkit::{ACCESS_KEY, ChaosProxy, S3Server, SECRET_KEY};
use std::collections::HashMap;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use tonic::Code;

#[test]
fn a_volume_is_shared_by_the_pods_of_a_node_and_leaves_nothing() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    let early = rig.publish("pv", "a", &attributes).unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition, "{early}");
    for _ in 0..2 {
        rig.stage("pv", &attributes).unwrap();
    }
    for pod in ["a", "b", "a"] {
        rig.publish("pv", pod, &attributes).unwrap();
    }
    assert_eq!(
        (rig.read("a").unwrap(), rig.read("b").unwrap()),
        (b"hello from the source".into(), b"hello from the source".into())
    );
    assert_eq!(rig.launched().len(), 1);
    let condition = rig.condition("pv", "a").unwrap();
    assert!(!condition.abnormal && condition.message.contains("mounted"), "{condition:?}");
    assert_eq!(rig.condition("pv", "nowhere").unwrap_err().code(), Code::NotFound);
    // Other options need another mount.
    let mut other = attributes.clone();
    other.insert("mountOptions".into(), "cache-size=0,metrics=none,file-mode=555".into());
    assert_eq!(rig.stage("pv", &other).unwrap_err().code(), Code::AlreadyExists);
    for _ in 0..2 {
        rig.unpublish("pv", "a").unwrap();
    }
    assert!(!rig.target("a").exists());
    assert!(rig.read("b").is_ok());
    rig.unpublish("pv", "b").unwrap();
    for _ in 0..2 {
        rig.unstage("pv").unwrap();
    }
    rig.check_empty();
}

#[test]
fn a_volume_with_rw_changes_its_source_but_not_for_pods_that_only_read() {
    use pb::volume_capability::access_mode::Mode;
    let Some(rig) = DriverRig::new() else { return };
    let mut attributes = rig.attributes();
    attributes.insert("mountOptions".into(), "cache-size=0,metrics=none,rw".into());
    // A claim that only reads contradicts the option, and so does a bucket.
    let error = rig.stage("pv", &attributes).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("[ReadWriteMany]"), "{error}");
    let many = || capability_of(Mode::MultiNodeMultiWriter);
    let bucket = attributes.clone().into_iter().chain([pair(("source", "gs://bucket"))]).collect();
    let error = rig.stage_as("pv", &bucket, many()).unwrap_err();
    assert!(error.message().contains("gs://bucket is neither a directory nor an S3 bucket"), "{error}");
    rig.check_empty();

    rig.stage_as("pv", &attributes, many()).unwrap();
    rig.publish_as("pv", "writer", &attributes, many(), false).unwrap();
    rig.publish_as("pv", "reader", &attributes, many(), true).unwrap();
    std::fs::write(rig.target("writer").join("new"), b"written").unwrap();
    assert_eq!(std::fs::read(rig.path("src/new")).unwrap(), b"written");
    wait_for("the new file", || std::fs::read(rig.target("reader").join("new")).is_ok_and(|text| text == b"written"));
    let refused = std::fs::write(rig.target("reader").join("other"), b"x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    // It stays so when the mount process is replaced.
    rig.kill_mounts();
    wait_for("the replaced mount", || rig.read("writer").is_ok() && rig.read("reader").is_ok());
    std::fs::write(rig.target("writer").join("new"), b"again").unwrap();
    let refused = std::fs::write(rig.target("reader").join("other"), b"x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    for pod in ["writer", "reader"] {
        rig.unpublish("pv", pod).unwrap();
    }
    rig.unstage("pv").unwrap();
    rig.check_empty();
    assert_eq!(std::fs::read(rig.path("src/new")).unwrap(), b"again");
    // Without the option, claims of any mode are mounted for reading.
    rig.stage_as("pv", &rig.attributes(), many()).unwrap();
    rig.publish_as("pv", "writer", &rig.attributes(), many(), false).unwrap();
    assert!(std::fs::write(rig.target("writer").join("new"), b"x").is_err());
    rig.unpublish("pv", "writer").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// A volume of a bucket that pods of several nodes change, staged; returns its attributes.
fn stage_bucket(rig: &DriverRig, server: &S3Server) -> HashMap<String, String> {
    server.create_bucket("bucket");
    let options = format!("endpoint-url={},cache-size=0,metrics=none,rw", server.endpoint());
    let attributes: HashMap<_, _> = [("source", "s3://bucket/p"), ("mountOptions", &options)].map(pair).into();
    let request = pb::NodeStageVolumeRequest {
        volume_id: "pv".into(),
        staging_target_path: rig.path("staging-pv").display().to_string(),
        volume_capability: Some(written_by_many()),
        volume_context: attributes.clone(),
        secrets: [("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)].map(pair).into(),
        ..Default::default()
    };
    rig.runtime.block_on(rig.client().node_stage_volume(request)).unwrap();
    attributes
}

fn written_by_many() -> pb::VolumeCapability {
    capability_of(pb::volume_capability::access_mode::Mode::MultiNodeMultiWriter)
}

/// A file that a pod closes is an object, and one of another program is a file of the pod.
#[test]
fn a_volume_of_a_bucket_is_written_by_a_pod() {
    let Some(rig) = DriverRig::new() else { return };
    let server = S3Server::in_memory().unwrap();
    let attributes = stage_bucket(&rig, &server);
    server.put("bucket", "p/old", b"of others");
    rig.publish_as("pv", "writer", &attributes, written_by_many(), false).unwrap();
    assert_eq!(std::fs::read(rig.target("writer").join("old")).unwrap(), b"of others");
    std::fs::write(rig.target("writer").join("new"), b"written").unwrap();
    assert_eq!(server.bytes("bucket", "p/new").unwrap(), b"written");
    rig.unpublish("pv", "writer").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

/// The nodes have a file whose volume is gone, and upload it when the store answers again.
#[test]
fn a_pod_with_a_staged_volume_ends_before_the_upload() {
    let Some(rig) = DriverRig::new() else { return };
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let proxy = ChaosProxy::start(server.address()).unwrap();
    let group = StagingGroup::start(&world, 2, "s3://bucket/p", &proxy.endpoint());
    let options = "cache-size=0,metrics=none,rw,stage";
    let attributes = [("source", "s3://bucket/p"), ("mountOptions", options), ("registry", &group.registry)];
    let attributes = attributes.map(pair).into();
    rig.stage_as("pv", &attributes, written_by_many()).unwrap();
    rig.publish_as("pv", "writer", &attributes, written_by_many(), false).unwrap();
    let mut file = std::fs::File::create(rig.target("writer").join("result")).unwrap();
    proxy.refuse_connections(true);
    file.write_all(b"of a pod that ends").unwrap();
    file.sync_all().unwrap();
    drop(file);
    rig.unpublish("pv", "writer").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
    assert_eq!(server.bytes("bucket", "p/result"), None);
    proxy.refuse_connections(false);
    wait_for("the upload", || server.bytes("bucket", "p/result").as_deref() == Some(b"of a pod that ends"));
}

#[test]
fn flags_of_the_driver_come_from_variables_and_a_toml_file() {
    let dir = spurline_rig::program::tempdir();
    let toml = dir.path().join("spurline.toml");
    std::fs::write(&toml, "node-id = \"n\"\n[csi-driver]\nlauncher = \"process\"\nendpoint = \"csi.sock\"\n").unwrap();
    let refused = |variable: Option<&str>| {
        let mut command = spurline_rig::program::spurline();
        command.args(["k8s", "csi-driver", "--state-dir"]).arg(dir.path().join("state")).arg("--config").arg(&toml);
        command.envs(variable.map(|value| ("SPURLINE_ENDPOINT", value)));
        let out = command.output().unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, said) = refused(None);
    assert!(code == Some(2) && said.contains("--endpoint csi.sock names no absolute path"), "{said}");
    let (code, said) = refused(Some("other.sock"));
    assert!(code == Some(2) && said.contains("--endpoint other.sock"), "{said}");
    let (code, said) = refused(Some("/nowhere/at/all/csi.sock"));
    assert!(code == Some(3) && said.contains("/nowhere/at/all/csi.sock") && said.contains("fix: "), "{said}");
    std::fs::write(&toml, "[csi-driver]\nlauncer = \"pod\"\n").unwrap();
    let (code, said) = refused(None);
    assert!(code == Some(2) && said.contains("csi-driver.launcer") && said.contains("'launcher'"), "{said}");
}

#[test]
fn an_inline_volume_lives_as_long_as_its_pod() {
    let Some(rig) = DriverRig::new() else { return };
    let mut attributes = rig.attributes();
    attributes.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
    rig.publish("csi-1", "a", &attributes).unwrap();
    assert!(rig.read("a").is_ok());
    rig.unpublish("csi-1", "a").unwrap();
    rig.check_empty();
}

#[test]
fn inline_volumes_of_strangers_have_no_rights_of_the_node() {
    let rig = DriverRig::with("node-1", |_| (["--launcher", "process"].map(str::to_owned).into(), Vec::new()));
    let mut attributes = rig.attributes();
    let inline = pair(("csi.storage.k8s.io/ephemeral", "true"));
    attributes.insert(inline.0, inline.1);
    attributes.insert("mountOptions".into(), "cache-size=0".into());
    for (more, says) in [
        (pair(("source", &rig.path("src").display().to_string())), "as its source"),
        (pair(("source", "s3://bucket")), "has no keys"),
        (pair(("mountOptions", "access-log=/etc/spurline-test")), "the mount option access-log"),
    ] {
        attributes.insert(more.0, more.1);
        let error = rig.publish("csi-1", "a", &attributes).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(says) && error.message().contains("PersistentVolume"), "{error}");
    }
    rig.check_empty();
}

#[test]
fn bad_input_is_refused_with_the_sentence_and_leaves_nothing() {
    let Some(rig) = DriverRig::new() else { return };
    let base = rig.attributes();
    let with = |more: &[(&str, &str)]| {
        let mut attributes = base.clone();
        attributes.extend(more.iter().copied().map(pair));
        attributes
    };
    let none = rig.path("none").display().to_string();
    for (attributes, code, says) in [
        (with(&[("sorce", "x")]), Code::InvalidArgument, "did you mean source?"),
        (with(&[("mountOptions", "cachesize=1G")]), Code::InvalidArgument, "did you mean cache-size?"),
        (with(&[("mountOptions", "buffer-size=1M,cache-size=0")]), Code::InvalidArgument, "is too small"),
        (with(&[("source", "s4://b")]), Code::InvalidArgument, "did you mean s3://?"),
        (with(&[("source", none.as_str())]), Code::FailedPrecondition, "can't be mounted"),
        (with(&[("source", "")]), Code::InvalidArgument, "no attribute 'source'"),
        (with(&[("registry", "static:127.0.0.1:1")]), Code::FailedPrecondition, "127.0.0.1:1"),
    ] {
        let error = rig.stage("pv", &attributes).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(says) && !error.message().contains('\n'), "{error}");
        rig.check_empty();
    }
    let block = pb::NodeStageVolumeRequest {
        volume_id: "pv".into(),
        staging_target_path: "/staging".into(),
        volume_capability: Some(pb::VolumeCapability {
            access_type: Some(pb::volume_capability::AccessType::Block(Default::default())),
            ..Default::default()
        }),
        volume_context: base.clone(),
        ..Default::default()
    };
    let error = rig.runtime.block_on(rig.client().node_stage_volume(block)).unwrap_err();
    assert!(error.message().contains("volumeMode: Block"), "{error}");
    // A secret with a wrong key, whose content is in no message and no log.
    let secret = pb::NodeStageVolumeRequest {
        volume_id: "pv".into(),
        staging_target_path: "/staging".into(),
        volume_capability: Some(capability()),
        volume_context: base,
        secrets: [("AWS_ACCESS_KEY", "hush-hush")].map(pair).into(),
        ..Default::default()
    };
    let error = rig.runtime.block_on(rig.client().node_stage_volume(secret)).unwrap_err();
    assert!(error.message().contains("did you mean AWS_ACCESS_KEY_ID?"), "{error}");
    let log = std::fs::read_to_string(rig.path("driver.log")).unwrap();
    assert!(!error.message().contains("hush") && !log.contains("hush"));
    rig.check_empty();
}

#[test]
fn a_key_that_the_store_refuses_is_named_and_the_right_one_mounts() {
    let Some(rig) = DriverRig::new() else { return };
    let store = rig.path("store");
    std::fs::create_dir_all(store.join("data")).unwrap();
    std::fs::write(store.join("data/file"), "bytes").unwrap();
    let server = spurline_testkit::S3Server::start(&store).unwrap();
    let options = format!("endpoint-url={},cache-size=0,metrics=none", server.endpoint());
    let stage = |secret: &str| {
        let request = pb::NodeStageVolumeRequest {
            volume_id: "pv".into(),
            staging_target_path: "/staging".into(),
            volume_capability: Some(capability()),
            volume_context: [pair(("source", "s3://data")), pair(("mountOptions", &options))].into(),
            secrets: [("AWS_ACCESS_KEY_ID", spurline_testkit::ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", secret)]
                .map(pair)
                .into(),
            ..Default::default()
        };
        rig.runtime.block_on(rig.client().node_stage_volume(request))
    };
    let error = stage("a-wrong-secret").unwrap_err();
    let text = error.message();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(text.contains("s3://data") && text.contains("the secret does not fit the access key"), "{error}");
    assert!(!text.contains("a-wrong-secret") && !text.contains('\n'), "{error}");
    rig.check_empty();
    stage(spurline_testkit::SECRET_KEY).unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
}

#[test]
fn a_pod_deleted_while_its_mount_starts_ends_the_start() {
    let Some(rig) = DriverRig::new() else { return };
    // A server that accepts and never answers keeps a start waiting.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("endpoint-url=http://{}", silent.local_addr().unwrap());
    let mut attributes: HashMap<_, _> = [
        ("source", "s3://bucket"),
        ("mountOptions", &format!("{endpoint},anonymous,cache-size=0,metrics=none")),
        ("csi.storage.k8s.io/ephemeral", "true"),
    ]
    .map(pair)
    .into();
    let starting = {
        let (rig, attributes) = (Arc::clone(&rig), attributes.clone());
        std::thread::spawn(move || rig.publish("csi-1", "a", &attributes))
    };
    wait_for("the start", || !rig.processes().is_empty());
    rig.unpublish("csi-1", "a").unwrap();
    let error = starting.join().unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Aborted, "{error}");
    rig.check_empty();
    // The same for a staged volume.
    attributes.remove("csi.storage.k8s.io/ephemeral");
    let starting = {
        let (rig, attributes) = (Arc::clone(&rig), attributes.clone());
        std::thread::spawn(move || rig.stage("pv", &attributes))
    };
    wait_for("the start", || !rig.processes().is_empty());
    rig.unstage("pv").unwrap();
    assert_eq!(starting.join().unwrap().unwrap_err().code(), Code::Aborted);
    rig.check_empty();
}

/// The files of a pod's service account and a template of mount pods in `dir`; the arguments that name them.
fn service_account(dir: &Path) -> Vec<String> {
    let authority = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    for (name, text) in [
        ("token", "a-token"),
        ("namespace", "spurline"),
        ("ca.crt", authority.cert.pem().as_str()),
        ("mount-pod.yaml", "spec: {containers: [{name: mount, image: i}]}"),
    ] {
        std::fs::write(dir.join(name), text).unwrap();
    }
    let words = [("--service-account", dir.to_owned()), ("--pod-template", dir.join("mount-pod.yaml"))];
    words.into_iter().flat_map(|(flag, path)| [flag.to_owned(), path.display().to_string()]).collect()
}

/// The variables that name an API server at this port.
fn api_server_at(port: u16) -> Vec<(String, String)> {
    let port = port.to_string();
    [("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", port.as_str())].map(pair).into()
}

#[test]
fn a_silent_api_server_is_named_and_nothing_stays() {
    // It accepts connections and does not answer. The driver serves in spite of it.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let mut rig = DriverRig::with("node-1", |dir| {
        ([service_account(dir), vec!["--trust-inline-volumes".to_owned()]].concat(), api_server_at(port))
    });
    let attributes = rig.attributes();
    let inline = attributes.clone().into_iter().chain([pair(("csi.storage.k8s.io/ephemeral", "true"))]).collect();
    let check = |error: tonic::Status, why: &str| {
        let wanted = format!("127.0.0.1:{port} does not answer POST /api/v1/namespaces/spurline/pods: {why}");
        let text = error.message();
        assert!(text.contains(&wanted) && text.contains("NetworkPolicy") && !text.contains('\n'), "{error}");
        rig.check_empty();
    };
    check(rig.stage("pv", &attributes).unwrap_err(), "no connection within 5 s");
    check(rig.publish("csi-1", "a", &inline).unwrap_err(), "no connection within 5 s");
    assert!(!rig.target("a").exists());
    rig.unpublish("csi-1", "a").unwrap();
    rig.unstage("pv").unwrap();
    drop(silent);
    check(rig.stage("pv", &attributes).unwrap_err(), "Connection refused");
    rig.end_driver(rustix::process::Signal::TERM);
    assert!(!rig.path("csi.sock").exists());
}

#[test]
fn a_silent_registry_or_node_ends_the_start_and_is_named() {
    let Some(rig) = DriverRig::new() else { return };
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        for kind in ["static:", "coordinator://", "etcd://"] {
            let (rig, at) = (&rig, &at);
            scope.spawn(move || {
                let mut attributes = rig.attributes();
                attributes.insert("registry".into(), format!("{kind}{at}"));
                let error = rig.stage(&format!("pv-{}", &kind[..4]), &attributes).unwrap_err();
                assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
                let text = error.message();
                assert!(text.contains(at.as_str()) && text.contains("no answer") && text.contains("; "), "{error}");
                assert!(!text.contains('\n'), "{error}");
            });
        }
    });
    rig.check_empty();
}

#[test]
fn a_cache_node_that_stops_is_in_the_condition_and_delays_no_end() {
    let Some(rig) = DriverRig::new() else { return };
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut command = spurline_rig::program::spurline();
    command.args(["node", "--cache-size", "0", "--metrics", "none", "--group-port", &port, "--source"]);
    command.arg(rig.path("src")).stdin(Stdio::null()).stderr(std::fs::File::create(rig.path("node.log")).unwrap());
    let mut node = command.spawn().unwrap();
    let served = || std::fs::read_to_string(rig.path("node.log")).unwrap().contains("serving on");
    wait_for("the node", || served() || node.try_wait().unwrap().is_some());
    let mut attributes = rig.attributes();
    attributes.insert("registry".into(), format!("static:127.0.0.1:{port}"));
    let options = "cache-size=0,metrics=none,peer-timeout=3s,peer-silence=1s";
    attributes.insert("mountOptions".into(), options.into());
    rig.stage("pv", &attributes).unwrap();
    rig.publish("pv", "a", &attributes).unwrap();
    assert!(rig.read("a").is_ok() && !rig.condition("pv", "a").unwrap().abnormal);
    let signal = |which| rig.signal(node.id() as i32, which);
    signal(rustix::process::Signal::STOP);
    let wanted = format!("no cache node of the volume answers: 127.0.0.1:{port}");
    let mut seen = String::new();
    wait_for("the condition", || {
        // An error, not a hang.
        let _ = std::fs::metadata(rig.target("a").join("file"));
        let now = rig.condition("pv", "a").unwrap();
        seen = now.message;
        now.abnormal
    });
    assert!(seen.contains(&wanted), "{seen}");
    signal(rustix::process::Signal::CONT);
    wait_for("the node's return", || rig.read("a").is_ok() && !rig.condition("pv", "a").unwrap().abnormal);
    signal(rustix::process::Signal::STOP);
    rig.unpublish("pv", "a").unwrap();
    rig.unstage("pv").unwrap();
    rig.check_empty();
    node.kill().unwrap();
    node.wait().unwrap();
}

#[test]
fn a_driver_without_permission_ends_with_the_remedy() {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let dir = spurline_rig::program::tempdir();
    let at = |name: &str| dir.path().join(name);
    for (name, mode) in [("", 0o755), ("own", 0o755), ("roots", 0o700)] {
        std::fs::create_dir_all(at(name)).unwrap();
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    if chown(at("own"), Some(65534), None).is_err() {
        return spurline_testkit::skip("root", "only root can start the driver as another user");
    }
    let account = service_account(&at("roots"));
    let template = at("mount-pod.yaml");
    std::fs::copy(at("roots/mount-pod.yaml"), &template).unwrap();
    let process = ["--launcher", "process"].map(str::to_owned).to_vec();
    let pods = [account[..2].to_vec(), vec!["--pod-template".into(), template.display().to_string()]].concat();
    for (state, socket, more, says) in [
        ("roots/state", "own/csi.sock", &process, ["--state-dir", "as root"]),
        ("own/state", "roots/csi.sock", &process, ["roots/csi.sock", "run the driver as root"]),
        ("own/state", "own/csi.sock", &account, ["pod template", "ConfigMap"]),
        ("own/state", "own/csi.sock", &pods, ["service account's file", "run the driver as root"]),
    ] {
        let plain = spurline_rig::program::spurline();
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(plain.get_program());
        command.args(["k8s", "csi-driver", "--node-id=n", "--state-dir"]).arg(at(state));
        command.arg(format!("--endpoint=unix://{}", at(socket).display())).args(more).envs(api_server_at(1));
        let Ok(out) = command.output() else { return spurline_testkit::skip("setpriv", "there is no setpriv here") };
        let text = String::from_utf8(out.stderr).unwrap();
        if text.starts_with("setpriv:") {
            return spurline_testkit::skip("setpriv", "another user may not start the binary");
        }
        assert_eq!(out.status.code(), Some(3), "{text}");
        assert!(says.iter().all(|word| text.contains(word)) && text.contains("Permission denied"), "{text}");
        assert!(!at("own/csi.sock").exists());
    }
}

#[test]
fn calls_at_the_same_time_make_one_mount() {
    let Some(rig) = DriverRig::new() else { return };
    let attributes = rig.attributes();
    for round in 0..3 {
        let stages: Vec<_> = (0..4)
            .map(|_| {
                let (rig, attributes) = (Arc::clone(&rig), attributes.clone());
                std::thread::spawn(move || rig.stage("pv", &attributes))
            })
            .collect();
        stages.into_iter().for_each(|call| call.join().unwrap().unwrap());
        assert_eq!(rig.launched().len(), 1, "round {round}");
        let pods: Vec<_> = (0..8)
            .map(|n| {
                let (rig, attributes) = (Arc::clone(&rig), attributes.clone());
                // Each twice.
                std::thread::spawn(move || rig.publish("pv", &format!("pod-{}", n / 2), &attributes))
            })
            .collect();
        pods.into_iter().for_each(|call| call.join().unwrap().unwrap());
        for n in 0..4 {
            assert!(rig.read(&format!("pod-{n}")).is_ok());
        }
        let ends: Vec<_> = (0..8)
            .map(|n| {
                let rig = Arc::clone(&rig);
                std::thread::spawn(move || rig.unpublish("pv", &format!("pod-{}", n / 2)))
            })
            .collect();
        ends.into_iter().for_each(|call| call.join().unwrap().unwrap());
        rig.unstage("pv").unwrap();
        rig.check_empty();
    }
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    /// The conformance test of Kubernetes. A volume is a view of its source without a size of its own, so the one test that
    /// wants two sizes of one name to be a conflict is left out.
    #[test]
    fn the_conformance_test_of_kubernetes_passes() {
        let Some(rig) = DriverRig::new() else { return };
        let Some(program) = spurline_testkit::go_program("csi-sanity", "csi-sanity") else { return };
        let parameters = rig.path("parameters.yaml");
        let source = rig.path("src");
        let text = format!("source: {}\nmountOptions: cache-size=0,metrics=none\n", source.display());
        std::fs::write(&parameters, text).unwrap();
        let out = std::process::Command::new(program)
            .arg(format!("--csi.endpoint=unix://{}", rig.path("csi.sock").display()))
            .arg(format!("--csi.mountdir={}", rig.path("target").display()))
            .arg(format!("--csi.stagingdir={}", rig.path("staging").display()))
            .arg(format!("--csi.testvolumeparameters={}", parameters.display()))
            .args(["--ginkgo.no-color", "--ginkgo.skip=already existing name and different capacity"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && text.contains("SUCCESS!"), "{text}");
        println!("{}", text.lines().rev().find(|line| line.contains("Passed")).unwrap_or_default());
        rig.check_empty();
    }
}
