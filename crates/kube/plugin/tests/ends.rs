//! How a plugin ends, and starts that are refused.

use spurline_kube_plugin::{PluginSettings, start_plugin};
use spurline_types::fault::ExitKind;
use std::path::Path;
use std::time::Duration;

/// Settings for a node without devices in `dir`.
fn settings(dir: &Path) -> PluginSettings {
    let config =
        "{\"configList\": [{\"resourceName\": \"ib\", \"rdmaHcaMax\": 8, \"selectors\": {\"vendors\": [\"15b3\"]}}]}";
    std::fs::write(dir.join("config.json"), config).unwrap();
    std::fs::create_dir_all(dir.join("plugins")).unwrap();
    std::fs::create_dir_all(dir.join("host/sys/class")).unwrap();
    PluginSettings {
        config_file: dir.join("config.json"),
        plugin_dir: dir.join("plugins"),
        host_root: Some(dir.join("host")),
        cdi_dir: None,
        cdi_memlock: None,
        health_interval: Duration::from_secs(5),
    }
}

#[test]
fn it_ends_when_it_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let mut plugin = start_plugin(settings(dir.path())).unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("plugins")).unwrap().count(), 1, "its socket");
    plugin.stopper()();
    plugin.wait().unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("plugins")).unwrap().count(), 0);
}

#[test]
fn a_panic_of_its_loop_ends_the_process_with_code_1() {
    let dir = tempfile::tempdir().unwrap();
    // No point in time is that far away: the loop's addition panics.
    let endless = PluginSettings { health_interval: Duration::MAX, ..settings(dir.path()) };
    let mut plugin = start_plugin(endless).unwrap();
    let fault = plugin.wait().unwrap_err();
    assert_eq!(fault.code, ExitKind::Failed);
    assert!(fault.what.starts_with("the plugin's loop panicked: overflow"), "{fault}");
    assert!(fault.remedy.contains("report it"), "{fault}");
    assert_eq!(std::fs::read_dir(dir.path().join("plugins")).unwrap().count(), 0, "its socket is removed");
}

#[test]
fn a_folder_without_the_hosts_sys_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = PluginSettings { host_root: Some(dir.path().join("nowhere")), ..settings(dir.path()) };
    let fault = start_plugin(nowhere).unwrap_err();
    assert_eq!(fault.code, ExitKind::Missing);
    assert!(fault.what.contains("nowhere: there is no sys/class in it") && fault.remedy.contains("/sys"), "{fault}");
}

#[test]
fn the_configuration_file_is_named_once() {
    let dir = tempfile::tempdir().unwrap();
    let settings = settings(dir.path());
    std::fs::write(&settings.config_file, "{}").unwrap();
    let fault = start_plugin(settings).unwrap_err();
    assert_eq!(fault.what.matches("config.json").count(), 1, "{fault}");
    assert!(fault.what.contains("config.json: configList is missing"), "{fault}");
}
