//! The plugin without kubelet: how it starts, waits, collides and ends.

use crate::rig::{NodeRig, ib_config, wait_for};
use serde_json::{Value, json};
use spurline_testkit::hosts;
use std::os::unix::net::UnixListener;
use std::process::Command;

/// Runs a start that fails; exit code and messages.
fn refused(rig: &NodeRig) -> (i32, String) {
    let out = rig.command(&[]).output().unwrap();
    (out.status.code().unwrap(), String::from_utf8(out.stderr).unwrap())
}

#[test]
fn starts_that_fail_say_why() {
    let rig = NodeRig::new(&hosts::gb200(), "{\"configList\": [{\"resourceName\": \"rdma/ib\"}]}");
    let (code, text) = refused(&rig);
    assert!(code == 2 && text.contains("'rdma/ib' is no resource name") && text.contains("k8s lint"), "{code} {text}");
    std::fs::remove_file(rig.path("config.json")).unwrap();
    let (code, text) = refused(&rig);
    assert!(code == 3 && text.contains("config.json") && text.contains("k8s discover"), "{code} {text}");
    rig.configure(&ib_config(8));
    std::fs::remove_dir(rig.path("plugins")).unwrap();
    let (code, text) = refused(&rig);
    assert!(code == 3 && text.contains("plugins is no directory") && text.contains("--plugin-dir"), "{code} {text}");
}

#[test]
fn flags_come_from_variables_and_a_toml_file_and_a_user_without_rights_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let rig = NodeRig::new(&hosts::gb200(), &ib_config(8));
    let toml = rig.path("spurline.toml");
    std::fs::write(&toml, "[device-plugin]\nplugin-dir = \"/nowhere/at/all\"\nmetrics = \"none\"\n").unwrap();
    let mut command = crate::rig::spurline();
    command.args(["k8s", "device-plugin", "--config"]).arg(&toml);
    let out = command.env("SPURLINE_CONFIG_FILE", rig.path("config.json")).output().unwrap();
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.code() == Some(3) && text.contains("/nowhere/at/all is no directory"), "{text}");
    std::fs::write(&toml, "plugin-dri = \"x\"\n").unwrap();
    let out = command.output().unwrap();
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.code() == Some(2) && text.contains("did you mean 'plugin-dir'?"), "{text}");
    // Another user may not make a socket in kubelet's directory.
    std::fs::set_permissions(rig.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    let plain = rig.command(&[]);
    let mut command = std::process::Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    let Ok(out) = command.arg(plain.get_program()).args(plain.get_args()).output() else {
        return spurline_testkit::skip("setpriv", "there is no setpriv here");
    };
    let text = String::from_utf8(out.stderr).unwrap();
    if text.starts_with("setpriv:") {
        return spurline_testkit::skip("setpriv", "this user may not become another one, or not start the binary");
    }
    assert!(out.status.code() == Some(3) && text.contains("run the plugin as root"), "{text}");
}

#[test]
fn without_kubelet_it_waits_and_leaves_nothing_behind() {
    let mut rig = NodeRig::new(&hosts::gb200(), &ib_config(8));
    rig.start(&[]);
    rig.wait_log("rdma/ib is not registered", 1);
    let log = rig.log();
    assert!(log.contains("kubelet does not run") && log.contains("it is tried again"), "{log}");
    assert_eq!(rig.sockets(), ["spurline-rdma_ib.sock"]);
    let health = wait_for("the health page", || rig.page("/healthz"));
    assert!(health.contains("503") && health.contains("rdma/ib is not registered at kubelet"), "{health}");
    assert_eq!(rig.metric("spurline_k8s_slots{resource=\"rdma/ib\"}"), Some(8));
    assert_eq!(rig.metric("spurline_k8s_registered{resource=\"rdma/ib\"}"), Some(0));
    assert_eq!(rig.metric("spurline_k8s_hca_healthy{resource=\"rdma/ib\",hca=\"mlx5_0\"}"), Some(1));
    assert_eq!(rig.stop(), Some(0));
    assert!(rig.sockets().is_empty());
    // The refused connection is reported once, not at each attempt.
    assert_eq!(rig.log().matches("is not registered").count(), 1, "{}", rig.log());
}

#[test]
fn a_silent_kubelet_is_named_and_delays_no_end() {
    let mut rig = NodeRig::new(&hosts::gb200(), &ib_config(8));
    // It takes connections and answers nothing.
    let _silent = UnixListener::bind(rig.path("plugins/kubelet.sock")).unwrap();
    rig.start(&[]);
    rig.wait_log("kubelet.sock does not answer within 10 s; it is tried again", 1);
    assert_eq!(rig.metric("spurline_k8s_registered{resource=\"rdma/ib\"}"), Some(0));
    assert_eq!(rig.stop(), Some(0));
    assert!(rig.sockets().is_empty());
}

#[test]
fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
    let mut rig = NodeRig::new(&hosts::gb200(), &ib_config(8));
    let path = rig.path("plugins/spurline-rdma_ib.sock");
    drop(UnixListener::bind(&path).unwrap());
    rig.start(&[]);
    rig.wait_log("is not registered", 1);
    assert_eq!(rig.sockets(), ["spurline-rdma_ib.sock"]);
    rig.kill();
    assert_eq!(rig.sockets(), ["spurline-rdma_ib.sock"], "a killed plugin leaves its socket");
    std::fs::remove_file(&path).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    rig.start(&[]);
    rig.wait_log("another process listens", 1);
    wait_for("the second socket", || (rig.sockets().len() == 2).then_some(()));
    assert_eq!(rig.sockets(), ["spurline-rdma_ib-2.sock", "spurline-rdma_ib.sock"]);
    assert_eq!(rig.stop(), Some(0));
    assert_eq!(rig.sockets(), ["spurline-rdma_ib.sock"], "the other process keeps its socket");
}

#[test]
fn resources_of_two_prefixes_do_not_collide() {
    let entry = |prefix: &str, link: &str| {
        format!(
            "{{\"resourcePrefix\": \"{prefix}\", \"resourceName\": \"x\", \"rdmaHcaMax\": 4, \"selectors\": \
             {{\"linkTypes\": [\"{link}\"]}}}}"
        )
    };
    let config = format!("{{\"configList\": [{}, {}]}}", entry("rdma", "infiniband"), entry("example.com", "ether"));
    let mut rig = NodeRig::new(&hosts::gb200(), &config);
    rig.start(&[]);
    wait_for("both sockets", || (rig.sockets().len() == 2).then_some(()));
    assert_eq!(rig.sockets(), ["spurline-example.com_x.sock", "spurline-rdma_x.sock"]);
    assert!(rig.log().contains("the reference compares names without prefixes"), "{}", rig.log());
    // A configuration with an error changes nothing; a good one is taken over.
    rig.configure("{\"configList\": [");
    rig.wait_log("the former configuration stays in force", 1);
    assert_eq!(rig.sockets().len(), 2);
    assert_eq!(rig.metric("spurline_k8s_config_valid"), Some(0));
    rig.configure(&ib_config(8));
    rig.wait_log("a new configuration is in force", 1);
    wait_for("the other socket", || (rig.sockets() == ["spurline-rdma_ib.sock"]).then_some(()));
    assert_eq!(rig.metric("spurline_k8s_config_valid"), Some(1));
}

#[test]
fn a_cdi_file_that_cant_be_written_makes_slots_unhealthy_until_it_can() {
    let mut rig = NodeRig::new(&hosts::gb200(), &ib_config(8));
    let cdi = rig.path("cdi");
    // A file where the directory should be.
    std::fs::write(&cdi, "").unwrap();
    rig.start(&["--use-cdi", "--cdi-dir", cdi.to_str().unwrap()]);
    rig.wait_log("its CDI file", 1);
    let health = wait_for("the health page", || rig.page("/healthz"));
    assert!(health.contains("503") && health.contains("spurline-rdma-ib.json can't be written"), "{health}");
    assert_eq!(rig.metric("spurline_k8s_healthy_slots{resource=\"rdma/ib\"}"), Some(0));
    assert_eq!(rig.metric("spurline_k8s_cdi_valid{resource=\"rdma/ib\"}"), Some(0));
    std::fs::remove_file(&cdi).unwrap();
    rig.wait_log("rdma/ib: its CDI file is written", 1);
    assert_eq!(rig.metric("spurline_k8s_healthy_slots{resource=\"rdma/ib\"}"), Some(8));
    assert_eq!(rig.metric("spurline_k8s_cdi_valid{resource=\"rdma/ib\"}"), Some(1));
    // One that is removed is written again.
    let file = cdi.join("spurline-rdma-ib.json");
    std::fs::remove_file(&file).unwrap();
    wait_for("the file", || file.exists().then_some(()));
    assert_eq!(rig.stop(), Some(0));
    assert!(file.exists(), "containers of running pods may restart meanwhile");
    // The next process removes the files of resources that are no longer configured.
    rig.configure(&ib_config(8).replace("\"ib\"", "\"other\""));
    rig.start(&["--use-cdi", "--cdi-dir", cdi.to_str().unwrap()]);
    wait_for("the other file", || cdi.join("spurline-rdma-other.json").exists().then_some(()));
    assert!(!file.exists());
}

/// The hook of the CDI file in a container of a real runtime, whose user is not root. Within this host's hard limit, so
/// that no capability is needed.
#[test]
fn the_hook_raises_locked_memory_for_a_user_without_privileges() {
    let mut rig = NodeRig::new(&hosts::gb200(), &ib_config(8));
    let out = rig.command(&["--cdi-memlock", "unlimited"]).output().unwrap();
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.code() == Some(2) && said.contains("give --use-cdi too"), "{said}");
    let cdi = rig.path("cdi");
    rig.start(&["--use-cdi", "--cdi-dir", cdi.to_str().unwrap(), "--cdi-memlock", "4M"]);
    let file = cdi.join("spurline-rdma-ib.json");
    let text = wait_for("the CDI file", || std::fs::read_to_string(&file).ok());
    let spec: Value = serde_json::from_str(&text).unwrap();
    let mut hook = spec["containerEdits"]["hooks"][0].clone();
    assert_eq!(hook.as_object_mut().unwrap().remove("hookName").unwrap(), "createRuntime");

    let found = |program: &str| Command::new(program).arg("--help").output().is_ok();
    if !["runc", "busybox", "prlimit"].into_iter().all(found) {
        return spurline_testkit::skip("runc", "there is no runc, busybox or prlimit here");
    }
    let bundle = rig.path("bundle");
    for dir in ["bin", "proc", "dev", "sys"] {
        std::fs::create_dir_all(bundle.join("rootfs").join(dir)).unwrap();
    }
    let shell = "cp \"$(command -v busybox)\" rootfs/bin/sh && runc spec";
    assert!(Command::new("sh").args(["-c", shell]).current_dir(&bundle).status().unwrap().success());
    let config = bundle.join("config.json");
    let mut container: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    container["process"]["terminal"] = json!(false);
    container["process"]["user"] = json!({ "uid": 1000, "gid": 1000 });
    container["process"]["args"] = json!(["sh", "-c", "ulimit -l"]);
    // What containerd sets; and words that look like the field that the hook reads.
    container["process"]["rlimits"] = json!([{ "type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024 }]);
    container["annotations"] = json!({ "a": "\"pid\": 1, ", "pid": "1" });
    let run = |container: &Value, name: &str| {
        std::fs::write(&config, container.to_string()).unwrap();
        let id = format!("spurline-{name}-{}", std::process::id());
        // The limit of a node's runtime: 64 KiB.
        let limits = ["--memlock=65536:4194304", "runc", "run", &id];
        let out = Command::new("prlimit").args(limits).current_dir(&bundle).output().unwrap();
        (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let (plain, said) = run(&container, "plain");
    if plain.trim() != "64" {
        return spurline_testkit::skip("runc", &format!("runc does not run here: {}", said.trim()));
    }
    container["hooks"] = json!({ "createRuntime": [hook] });
    assert_eq!(run(&container, "hook"), ("4096\n".to_owned(), String::new()));
}
