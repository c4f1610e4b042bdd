// Memory that a thread keeps from step to step.
#pragma once

#include <cstddef>
#include <memory>

namespace forgeline {

struct Scratch {  // for the largest step that its thread met
    std::unique_ptr<char[]> memory;
    size_t size = 0;

    char* at_least(size_t wanted) {
        if (wanted > size) {
            memory.reset();
            memory.reset(new char[wanted]);
            size = wanted;
        }
        return memory.get();
    }
};

}  // namespace forgeline
