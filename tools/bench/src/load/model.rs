//! Models in safetensors files: names and shapes of a Llama of any size, written with known bytes, and the tensors of files that
//! are there. Reads no tensor.

use crate::engine::pattern::FileRange;
use crate::error::{BenchError, FileContext, Result};
use crate::scratch::fill_pattern;
use crate::stop;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

/// Bytes of an element: bfloat16.
const ELEMENT_BYTES: u64 = 2;
/// The longest header that is believed.
const MOST_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of a model from which the layers have the shapes of Llama 3 8B.
const WHOLE_LAYERS_FROM: u64 = 4 << 30;

#[derive(Debug, Clone)]
pub struct ModelFiles {
    pub paths: Vec<PathBuf>,
    pub lens: Vec<u64>,
    /// The tensors, in the order of the files.
    pub tensors: Vec<FileRange>,
}

impl ModelFiles {
    pub fn bytes(&self) -> u64 {
        self.lens.iter().sum()
    }

    /// The model in a line.
    pub fn describe(&self) -> String {
        format!("{} tensors in {} files, {} MB", self.tensors.len(), self.paths.len(), self.bytes() / 1_000_000)
    }

    /// The same model in another folder.
    pub fn in_folder(&self, dir: &Path) -> ModelFiles {
        let paths = self.paths.iter().map(|path| dir.join(path.file_name().unwrap_or_default())).collect();
        ModelFiles { paths, ..self.clone() }
    }
}

/// A tensor to write.
struct TensorPlan {
    name: String,
    shape: Vec<u64>,
}

impl TensorPlan {
    fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * ELEMENT_BYTES
    }
}

/// The tensors of a Llama with about `bytes` bytes: as many layers as fit, of the published shapes or of smaller ones.
fn plan_tensors(bytes: u64) -> Vec<TensorPlan> {
    // A quarter of the width is a sixteenth of a layer.
    let shrink = if bytes >= WHOLE_LAYERS_FROM {
        1
    } else if bytes >= WHOLE_LAYERS_FROM / 16 {
        4
    } else {
        32
    };
    let hidden = 4096 / shrink;
    let inner = 14_336 / shrink;
    let keys = 1024 / shrink;
    let words = 128_256 / shrink;
    let mut tensors = vec![TensorPlan { name: "model.embed_tokens.weight".into(), shape: vec![words, hidden] }];
    let mut total = 2 * tensors[0].bytes();
    for layer in 0.. {
        let shapes = [
            ("input_layernorm", vec![hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
        ];
        let named =
            shapes.map(|(part, shape)| TensorPlan { name: format!("model.layers.{layer}.{part}.weight"), shape });
        let layer_bytes: u64 = named.iter().map(TensorPlan::bytes).sum();
        if layer > 0 && total + layer_bytes > bytes {
            break;
        }
        total += layer_bytes;
        tensors.extend(named);
    }
    tensors.push(TensorPlan { name: "model.norm.weight".into(), shape: vec![hidden] });
    tensors.push(TensorPlan { name: "lm_head.weight".into(), shape: vec![words, hidden] });
    tensors
}

/// Writes a model of about `bytes` bytes in `files` files into `dir`.
pub fn write_model(dir: &Path, bytes: u64, files: usize) -> Result<()> {
    std::fs::create_dir_all(dir).in_file(dir)?;
    let entries = std::fs::read_dir(dir).in_file(dir)?;
    if entries.flatten().any(|entry| entry.path().extension().is_some_and(|end| end == "safetensors")) {
        return Err(BenchError::Usage(format!("{} has a model already: give an empty folder", dir.display())));
    }
    let tensors = plan_tensors(bytes);
    let total: u64 = tensors.iter().map(TensorPlan::bytes).sum();
    let mut rest = tensors.as_slice();
    for file in 0..files {
        let wanted = total / files as u64;
        let mut size = 0;
        let mut count = 0;
        while count < rest.len() && (file + 1 == files || size < wanted) {
            size += rest[count].bytes();
            count += 1;
        }
        let (own, others) = rest.split_at(count);
        rest = others;
        write_file(&dir.join(format!("model-{:05}-of-{files:05}.safetensors", file + 1)), own, file as u64)?;
    }
    Ok(())
}

fn write_file(path: &Path, tensors: &[TensorPlan], seed: u64) -> Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.bytes();
        header
            .insert(tensor.name.clone(), json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}));
    }
    let mut text = Value::Object(header).to_string();
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
    let mut file = File::create(path).in_file(path)?;
    file.write_all(&(text.len() as u64).to_le_bytes()).in_file(path)?;
    file.write_all(text.as_bytes()).in_file(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < end {
        stop::check_stop()?;
        let len = buffer.len().min((end - at) as usize);
        fill_pattern(seed, at, &mut buffer[..len]);
        file.write_all(&buffer[..len]).in_file(path)?;
        at += len as u64;
    }
    Ok(())
}

/// The safetensors files of a folder, and all tensors.
/// `Usage` for a folder without any, and for a file that is not safetensors.
pub fn find_model(dir: &Path) -> Result<ModelFiles> {
    let entries = std::fs::read_dir(dir).in_file(dir)?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    paths.sort();
    if paths.is_empty() {
        let why =
            format!("{} has no *.safetensors: write some with --make, into the source of the mount", dir.display());
        return Err(BenchError::Usage(why));
    }
    let mut model = ModelFiles { paths, lens: Vec::new(), tensors: Vec::new() };
    for (number, path) in model.paths.iter().enumerate() {
        let len = std::fs::metadata(path).in_file(path)?.len();
        model.lens.push(len);
        model.tensors.extend(read_header(path, number, len)?);
    }
    Ok(model)
}

fn read_header(path: &Path, number: usize, file_len: u64) -> Result<Vec<FileRange>> {
    let faulty = |why: &str| BenchError::Usage(format!("{} is not a safetensors file: {why}", path.display()));
    let mut file = File::open(path).in_file(path)?;
    let mut head = [0; 8];
    file.read_exact(&mut head).in_file(path)?;
    let header_len = u64::from_le_bytes(head);
    if header_len > MOST_HEADER_BYTES.min(file_len.saturating_sub(8)) {
        return Err(faulty("its header is longer than the file"));
    }
    let mut text = vec![0; header_len as usize];
    file.read_exact(&mut text).in_file(path)?;
    let header: Map<String, Value> = serde_json::from_slice(&text).map_err(|error| faulty(&error.to_string()))?;
    let mut tensors = Vec::new();
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let offset = |end: usize| entry["data_offsets"][end].as_u64();
        let (Some(start), Some(end)) = (offset(0), offset(1)) else {
            return Err(faulty(&format!("{name} has no place")));
        };
        if start > end || end > file_len - 8 - header_len {
            return Err(faulty(&format!("{name} ends behind the file")));
        }
        tensors.push(FileRange { file: number, start: 8 + header_len + start, len: end - start });
    }
    tensors.sort_by_key(|tensor| tensor.start);
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_written_and_found() {
        let dir = tempfile::tempdir().unwrap();
        write_model(dir.path(), 30 << 20, 3).unwrap();
        let model = find_model(dir.path()).unwrap();
        assert_eq!(model.paths.len(), 3);
        assert!((25 << 20..36 << 20).contains(&model.bytes()), "{}", model.bytes());
        assert!(model.tensors.len() > 20 && model.tensors.iter().all(|tensor| tensor.len > 0));
        std::fs::write(dir.path().join("x.safetensors"), 99u64.to_le_bytes()).unwrap();
        assert!(find_model(dir.path()).unwrap_err().to_string().contains("longer than the file"));
        assert!(find_model(Path::new("/proc/self/fd")).unwrap_err().to_string().contains("--make"));
    }

    #[test]
    fn a_large_model_has_the_published_shapes() {
        let tensors = plan_tensors(16 << 30);
        let down = tensors.iter().find(|tensor| tensor.name == "model.layers.9.mlp.down_proj.weight").unwrap();
        assert_eq!(down.shape, [4096, 14_336]);
        let total: u64 = tensors.iter().map(TensorPlan::bytes).sum();
        assert!((15 << 30..=16 << 30).contains(&total), "{total}");
    }
}
