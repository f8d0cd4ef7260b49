// A whole file in memory. It is mapped: what is read of it comes from the disk then, and can be dropped again
// where memory is short.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/os/system.h"

// Gives back the memory of n bytes of that file from p on, from the page in which they begin to the last
// whole one: read again, they come from the disk or from what the system keeps of it.
inline void drop_mapped(const void* p, size_t n) {
    const auto* begin = static_cast<const std::byte*>(p);
    const size_t page = page_size();
    if (begin < mapped_range.begin || begin + n > mapped_range.begin + mapped_range.size) return;
    const size_t first = size_t(begin - mapped_range.begin) / page * page;
    const size_t end = size_t(begin - mapped_range.begin + n) / page * page;
    if (first < end) drop_mapped_pages(mapped_range.begin + first, end - first);
}

class MappedFile {
  public:
    MappedFile() = default;

    // Maps the file and reads nothing of it. Throws std::runtime_error "PATH: cannot open: reason" or "PATH:
    // not a regular file".
    // `shown` is the path as an error line may have it.
    MappedFile(const std::string& path, const std::string& shown) {
        mapping_ = map_file(path);
        if (!mapping_.error.empty()) {
            std::string line = path + ": " + mapping_.error;
            if (mapping_.no_entry && path_of(path).is_relative())
                line += " in the folder " + name_of(std::filesystem::current_path());
            throw std::runtime_error(line);
        }
        shown_ = std::make_unique<const std::string>(shown);
        if (mapping_.data != nullptr) mapped_range = {mapping_.data, mapping_.size, *shown_};
    }

    ~MappedFile() { release(); }
    MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
    MappedFile& operator=(MappedFile&& other) noexcept {
        std::swap(mapping_, other.mapping_);
        std::swap(shown_, other.shown_);
        return *this;
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {mapping_.data, mapping_.size}; }

  private:
    void release() {
        if (mapped_range.begin == mapping_.data) mapped_range = {};
        if (mapping_.data != nullptr) unmap_file(mapping_);
        mapping_ = {};
    }

    Mapping mapping_;
    std::unique_ptr<const std::string> shown_;  // stays where it is when this is moved
};
