// GOMP_parallel with threads of our own: the thread sanitizer does not know those of libgomp.
#include <thread>
#include <vector>

extern "C" void team(void (*work)(void*), void* argument, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(work, argument);
    work(argument);
    for (std::thread& other : others) other.join();
}
