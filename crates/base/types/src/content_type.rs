//! Content types of objects by their names.

/// The content type that the extension of a path suggests; `None` for an extension without a known type.
pub fn content_type_of(path: &[u8]) -> Option<&'static str> {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let extension = name.rsplit(|byte| *byte == b'.').next().filter(|extension| extension.len() < name.len());
    let extension = extension.map(|extension| String::from_utf8_lossy(extension).to_ascii_lowercase());
    match extension.as_deref() {
        Some("txt" | "log" | "md") => Some("text/plain"),
        Some("html" | "htm") => Some("text/html"),
        Some("css") => Some("text/css"),
        Some("csv") => Some("text/csv"),
        Some("js" | "mjs") => Some("text/javascript"),
        Some("json") => Some("application/json"),
        Some("xml") => Some("application/xml"),
        Some("yaml" | "yml") => Some("application/yaml"),
        Some("pdf") => Some("application/pdf"),
        Some("zip") => Some("application/zip"),
        Some("gz" | "tgz") => Some("application/gzip"),
        Some("tar") => Some("application/x-tar"),
        Some("parquet") => Some("application/vnd.apache.parquet"),
        Some("png") => Some("image/png"),
        Some("jpg" | "jpeg") => Some("image/jpeg"),
        Some("gif") => Some("image/gif"),
        Some("svg") => Some("image/svg+xml"),
        Some("webp") => Some("image/webp"),
        Some("mp4") => Some("video/mp4"),
        Some("mp3") => Some("audio/mpeg"),
        Some("wav") => Some("audio/wav"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_types_follow_extensions() {
        assert_eq!(content_type_of(b"a/b.JSON"), Some("application/json"));
        assert_eq!(content_type_of(b"json"), None);
        assert_eq!(content_type_of(b"x.tar/model.safetensors"), None);
    }
}
