//! The JSON of `status`, `stats` and `info` of real processes has the keys, the nesting, the types and the nulls of the
//! documents that the types of `observe` are tested with.

use crate::group::coordinator;
use serde_json::{Map, Value};
use spurline_rig::world::*;
use std::fs;
use std::path::Path;

/// A document without its values: every scalar is replaced by its type, and every list by its different elements.
fn shape(value: &Value) -> Value {
    match value {
        Value::Null => Value::Null,
        Value::Bool(_) => "bool".into(),
        Value::String(_) => "string".into(),
        Value::Number(number) => if number.is_u64() { "unsigned" } else { "float" }.into(),
        Value::Array(elements) => {
            let mut shapes: Vec<Value> = Vec::new();
            for element in elements {
                let element = shape(element);
                if !shapes.contains(&element) {
                    shapes.push(element);
                }
            }
            shapes.into()
        }
        Value::Object(members) => {
            members.iter().map(|(key, member)| (key.clone(), shape(member))).collect::<Map<_, _>>().into()
        }
    }
}

/// Documents that differ from those of the types' tests, each with its text.
struct DocumentCheck {
    differing: Vec<String>,
}

impl DocumentCheck {
    fn compare(&mut self, name: &str, document: &Value) {
        let known = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/service/observe/tests/documents");
        let text = fs::read(known.join(format!("{name}.json"))).unwrap_or_default();
        let wanted: Value = serde_json::from_slice(&text).unwrap_or_default();
        if shape(document) != shape(&wanted) {
            self.differing.push(format!("{name}: {document}"));
        }
    }

    /// The document that `spurline status` prints, without its counters.
    fn compare_status(&mut self, name: &str, mut document: Value) {
        let stats = document.as_object_mut().unwrap().remove("stats").unwrap();
        self.compare_counters(stats);
        self.compare(name, &document);
    }

    /// Counters without those of paths, which only some processes have.
    fn compare_counters(&mut self, mut stats: Value) {
        stats["paths"] = Value::Array(Vec::new());
        self.compare("stats", &stats);
    }
}

#[test]
fn documents_have_the_form_that_the_types_are_tested_with() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/a", &bytes(9, 3 * MIB));
    let source = world.path("source");
    let source = source.to_str().unwrap();
    let (_coordinator, address) = coordinator(&world, 0);
    let registry = format!("coordinator://{address}");
    let cache = world.dir("node-cache");
    let words = ["node", "--writable", "--source", source, "--name", "one", "--zone", "rack1", "--cache-dir"];
    let node = world.node_with(world.command(&words).arg(&cache).args(["--registry", &registry]));
    let mount_of_group = |name: &str, more: &[&str]| {
        let at = world.dir(name);
        let mut command = world.command(&["mount", source, at.to_str().unwrap(), "--registry", &registry]);
        world.mount_at(command.args(more), &at)
    };
    let reader = mount_of_group("reader", &[]);
    let writer = mount_of_group("writer", &["--rw"]);
    let alone = world.mount(source, &[]);
    for mount in [&reader, &writer, &alone] {
        assert_eq!(mount.read("a").len(), 3 * MIB);
    }
    let ask = |words: &[&str]| -> Value {
        let out = world.run(&[words, &["--json"]].concat());
        serde_json::from_slice(&out.stdout).unwrap_or_else(|error| panic!("{words:?}: {error}: {out:?}"))
    };
    let point = |mount: &Mount| mount.at.to_str().unwrap().to_owned();
    let file = |mount: &Mount| mount.path("a").to_str().unwrap().to_owned();

    let mut check = DocumentCheck { differing: Vec::new() };
    check.compare_status("status-coordinator", ask(&["status", &address]));
    check.compare_status("status-node", ask(&["status", &node.address]));
    check.compare_status("status-mount-of-group", ask(&["status", &point(&reader)]));
    check.compare_status("status-mount-writable", ask(&["status", &point(&writer)]));
    check.compare_status("status-mount-alone", ask(&["status", &point(&alone)]));
    let mut line = ask(&["status", "--registry", &registry]);
    check.compare_counters(line.as_object_mut().unwrap().remove("stats").unwrap());
    check.compare("status-of-registry", &line);
    check.compare("stats-of-group", &reader.stats());
    check.compare("info-of-group", &ask(&["info", &file(&reader)]));
    check.compare("info-writable", &ask(&["info", &file(&writer)]));
    check.compare("info-alone", &ask(&["info", &file(&alone)]));
    for mount in [reader, writer, alone] {
        mount.unmount();
    }
    assert!(check.differing.is_empty(), "documents of another form:\n{}", check.differing.join("\n"));
}
